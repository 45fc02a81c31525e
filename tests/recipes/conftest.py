from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `python3` prints its arguments, one a line, and fails for the module named in FAIL."""
    folder = tmp_path_factory.mktemp("bin")
    stub = folder / "python3"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "== end"\n[ "$2" != "$FAIL" ]\n')
    stub.chmod(0o755)
    return folder
