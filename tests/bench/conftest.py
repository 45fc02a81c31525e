"""The rollout benchmark as a module."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from verl_qerl.testing import load_beside


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """bench_rollout, which puts its folder on the path for the modules beside it."""
    before = list(sys.path)
    yield load_beside(__file__, "bench_rollout")
    sys.path[:] = before
