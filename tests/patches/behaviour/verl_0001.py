"""A plugin that cannot be loaded is reported at ERROR."""

import logging
import os
import sys
import tempfile
from pathlib import Path

records: list[logging.LogRecord] = []


class Collect(logging.Handler):
    """Keeps what reaches the logger."""

    def emit(self, record: logging.LogRecord) -> None:
        records.append(record)


with tempfile.TemporaryDirectory() as folder:
    info = Path(folder, "broken_plugin-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nbroken = broken_plugin_without_a_module\n")
    sys.path.insert(0, folder)
    os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "broken"
    logging.getLogger("verl").addHandler(Collect())
    import verl  # noqa: F401

about_it = [record for record in records if "broken" in record.getMessage()]
assert any(record.levelno >= logging.ERROR for record in about_it), (
    f"the failure of the plugin was logged as {[record.levelname for record in about_it]}, not as ERROR"
)
