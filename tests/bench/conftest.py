"""The rollout benchmark as a module."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """bench_rollout, which puts its folder on the path for the modules beside it."""
    spec = importlib.util.spec_from_file_location("bench_rollout", Path(__file__).with_name("bench_rollout.py"))
    assert spec is not None
    assert spec.loader is not None
    before = list(sys.path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
