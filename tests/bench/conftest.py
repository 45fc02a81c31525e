"""Benchmarks as modules; what lies beside them is on the path meanwhile."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from qerl_testing import load_beside


@pytest.fixture(scope="module")
def load_bench() -> Iterator[Callable[[str], ModuleType]]:
    """Gives a file of this folder by its name."""
    before = list(sys.path)
    sys.path.insert(0, str(Path(__file__).parent))
    yield lambda name: load_beside(__file__, name)
    sys.path[:] = before


@pytest.fixture(scope="module")
def bench(load_bench: Callable[[str], ModuleType]) -> ModuleType:
    return load_bench("bench_rollout")
