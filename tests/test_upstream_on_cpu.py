"""A shim replaces what it was written for, gives it back, and refuses everything else."""

import dataclasses
import importlib
import sys

import pytest

from verl_qerl.errors import UpstreamDriftError
from verl_qerl.upstream import (
    HostChange,
    Register,
    Shim,
    differing,
    fingerprint,
    fingerprint_in,
    goes_on_untested,
    install,
    reset_method,
    set_data,
    set_method,
    swap_class,
)

SOURCE = """
import functools

def scale(x):
    return x * 2

class Model:
    def run(self, x):
        return x * 3

    @classmethod
    def build(cls):
        return cls()

class Child(Model):
    pass
"""
PATCHED_SOURCE = SOURCE.replace("x * 3", "x * 30")


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """An installed package `toyhost` 1.2.0, shipped by a distribution of another name."""
    info = tmp_path / "toyhost_cpu-1.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toyhost-cpu\nVersion: 1.2.0\n")
    (info / "top_level.txt").write_text("toyhost\n")
    (tmp_path / "toyhost").mkdir()
    (tmp_path / "toyhost" / "__init__.py").write_text("")
    (tmp_path / "toyhost" / "model.py").write_text(SOURCE)
    (tmp_path / "toyhost" / "patched.py").write_text(PATCHED_SOURCE)
    (tmp_path / "toyhost" / "user.py").write_text("from toyhost.model import scale\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("toyhost.model")
    for name in [name for name in sys.modules if name.partition(".")[0] == "toyhost"]:
        del sys.modules[name]


def times_ten(original):
    def replacement(*args):
        return original(*args) * 10

    return replacement


def make_shim(model, **changes):
    patched = importlib.import_module("toyhost.patched")
    fields = {
        "target": "toyhost.model:Model.run",
        "versions": ">=1.2,<1.3",
        "fingerprint": fingerprint(model.Model.run),
        "patched": fingerprint(patched.Model.run),
        "patch": "toyhost/0001",
        "wrap": times_ten,
    }
    return Shim(**(fields | changes))


def test_replaces_once(upstream):
    shim = make_shim(upstream)
    assert install(shim) is True
    assert install(shim) is True
    assert upstream.Model().run(1) == 30


def test_replaces_a_function(upstream):
    shim = make_shim(upstream, target="toyhost.model:scale", fingerprint=fingerprint(upstream.scale))
    install(shim)
    assert upstream.scale(1) == 20


def test_the_replacement_looks_like_the_original(upstream):
    before = fingerprint(upstream.Model.run)
    install(make_shim(upstream))
    assert upstream.Model.run.__qualname__ == "Model.run"
    assert fingerprint(upstream.Model.run) == before


def test_stands_down_where_the_patch_is_applied(upstream):
    shim = make_shim(upstream, target="toyhost.patched:Model.run")
    assert install(shim) is False
    assert importlib.import_module("toyhost.patched").Model().run(1) == 30


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"versions": ">=2"}, "the installed version is 1.2.0"),
        ({"fingerprint": "000000000000"}, "its source has fingerprint"),
        ({"target": "toyhost.gone:Model.run"}, "No module named 'toyhost.gone'"),
        ({"target": "toyhost.model:Gone.run"}, "no attribute 'Gone'"),
        ({"target": "toyhost.model:Model.gone"}, "Model does not define gone"),
        ({"target": "toyhost.model:Child.run"}, "Child does not define run"),
        ({"target": "toyhost.model:Model.build"}, "it is a classmethod, not a plain function"),
        ({"target": "toyhost.model:functools"}, "it is a module, not a plain function"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_what_it_was_not_written_for(upstream, changes, reason):
    with pytest.raises(UpstreamDriftError, match=reason) as caught:
        install(make_shim(upstream, **changes))
    assert "or apply patch toyhost/0001 instead." in str(caught.value)
    assert upstream.Model().run(1) == 3


def test_refuses_a_target_that_another_shim_has(upstream):
    install(make_shim(upstream))
    with pytest.raises(UpstreamDriftError, match="the shim of toyhost/0001 has replaced it already"):
        install(make_shim(upstream, patch="toyhost/0002"))
    assert upstream.Model().run(1) == 30


def test_refuses_a_function_that_is_bound_elsewhere(upstream):
    importlib.import_module("toyhost.user")
    shim = make_shim(upstream, target="toyhost.model:scale", fingerprint=fingerprint(upstream.scale))
    with pytest.raises(UpstreamDriftError, match=r"imported by name already in toyhost\.user"):
        install(shim)
    assert upstream.scale(1) == 2


def test_replaces_a_function_where_it_is_known_to_be_bound(upstream):
    user = importlib.import_module("toyhost.user")
    changes = {"target": "toyhost.model:scale", "fingerprint": fingerprint(upstream.scale)}
    shim = make_shim(upstream, **changes, bindings=("toyhost.user",))
    assert install(shim) is True
    assert (upstream.scale(1), user.scale(1)) == (20, 20)


def test_refuses_a_binding_that_is_gone(upstream):
    changes = {"target": "toyhost.model:scale", "fingerprint": fingerprint(upstream.scale)}
    shim = make_shim(upstream, **changes, bindings=("toyhost.patched",))  # has a function of that name, but its own
    with pytest.raises(UpstreamDriftError, match=r"toyhost\.patched does not import it by name"):
        install(shim)
    assert upstream.scale(1) == 2


def test_refuses_a_package_without_a_distribution(upstream, monkeypatch):
    monkeypatch.setattr("importlib.metadata.packages_distributions", dict)
    with pytest.raises(UpstreamDriftError, match="no installed distribution ships the package toyhost"):
        install(make_shim(upstream))


def test_refuses_a_target_without_source(upstream):
    namespace = {}
    exec("def run(self, x):\n    return x\n", namespace)
    shim = make_shim(upstream)
    upstream.Model.run = namespace["run"]
    with pytest.raises(UpstreamDriftError, match="or apply patch"):
        install(shim)


def test_a_fingerprint_of_files_is_that_of_the_function(upstream, tmp_path):
    from toyhost.model import Model, scale

    assert fingerprint_in(tmp_path, "toyhost.model:Model.run") == fingerprint(Model.run)
    assert fingerprint_in(tmp_path, "toyhost.model:scale") == fingerprint(scale)
    assert fingerprint_in(tmp_path, "toyhost.model:Model.build") == fingerprint(Model.build)
    assert fingerprint_in(tmp_path, "toyhost.model:Model") == fingerprint(Model)
    for gone in ("toyhost.model:Model.walk", "toyhost.model:functools", "toyhost.nowhere:run", "toyhost.model:No.run"):
        assert fingerprint_in(tmp_path, gone) is None


def test_what_differs_is_found_without_an_import(upstream):
    _, run, gone = changes = [
        record("toyhost.model:scale", fingerprint(upstream.scale)),
        record("toyhost.model:Model.run", "000000000000"),
        record("toyhost.model:gone", "000000000000"),
    ]
    either = record("toyhost.model:scale", f"000000000000 {fingerprint(upstream.scale)}")
    missing = record("nosuchhost.model:gone", "000000000000")
    shims = [make_shim(upstream), make_shim(upstream, target="toyhost.patched:Model.run")]
    shims += [make_shim(upstream, fingerprint="000000000000")]
    del sys.modules["toyhost.model"]
    assert differing([*changes, either, missing, *shims]) == [run, gone, missing, shims[2]]
    assert "toyhost.model" not in sys.modules


@pytest.mark.parametrize("changes", [{"versions": "==1.3"}, {"fingerprint": "0" * 12}])
def test_untested_versions_are_a_warning_where_that_is_asked_for(upstream, monkeypatch, caplog, changes):
    shim = make_shim(upstream, **changes)
    monkeypatch.setenv("VERL_QERL_UNTESTED_VERSIONS", "1")
    assert install(shim)
    assert upstream.Model().run(2) == 60
    told = ["cannot replace toyhost.model:Model.run: its source"] if "fingerprint" in changes else []
    assert [" ".join(message.split()[:5]) for message in caplog.messages] == told


def test_the_warning_comes_once_and_lists_what_differs(upstream, monkeypatch, caplog):
    changes = Register("1.2")
    changes.add_overrides("toyhost.model:Model", "Why.", {"run": fingerprint(upstream.Model.run), "build": "0" * 12})
    scale = changes.add("override", "toyhost.model:scale", "Because.", "0" * 12)
    assert changes[-1] == scale == record("toyhost.model:scale")
    changes.append(record("otherhost.model:scale"))
    problem = "toyhost is 9.9. Install 1.2."
    assert not goes_on_untested(problem, "toyhost", changes)
    monkeypatch.setenv("VERL_QERL_UNTESTED_VERSIONS", "0")
    assert not goes_on_untested(problem, "toyhost", changes)
    monkeypatch.setenv("VERL_QERL_UNTESTED_VERSIONS", "1")
    assert goes_on_untested(problem, "toyhost", changes)
    assert goes_on_untested(problem, "toyhost", changes)
    assert caplog.messages == [
        "toyhost is 9.9. Install 1.2. VERL_QERL_UNTESTED_VERSIONS=1: going on, untested. 2 of the 3 places of toyhost"
        " that verl_qerl changes or follows are not those of the tested versions: toyhost.model:Model.build,"
        " toyhost.model:scale."
    ]


def record(target, sources="000000000000", kind="override"):
    return HostChange(("1.2",), kind, target, "Because.", sources)


def test_an_object_gets_another_class_and_keeps_its_attributes(upstream):
    class Fast(upstream.Model):
        def run(self, x):
            return x * self.factor

    model = upstream.Model()
    model.factor = 7
    assert swap_class(record("toyhost.model:Model", kind="class"), model, Fast) is model
    assert model.run(1) == 7
    assert upstream.Model().run(1) == 3


def test_a_function_is_hung_on_an_object_and_taken_off(upstream):
    model, change = upstream.Child(), record("toyhost.model:Model.run", kind="method")
    set_method(change, model, lambda x: x + 1)
    assert (model.run(1), upstream.Child().run(1)) == (2, 3)
    reset_method(change, model)
    assert model.run(1) == 3


def test_attributes_are_set_on_frozen_objects_too(upstream):
    @dataclasses.dataclass(frozen=True)
    class Frozen(upstream.Model):
        x: int = 1
        y: int = 1

    frozen, model, change = Frozen(), upstream.Model(), record("toyhost.model:Model.build", kind="data")
    for instance in (frozen, model):
        set_data(change, instance, x=2, y=3)
        assert (instance.x, instance.y) == (2, 3)


@pytest.mark.parametrize("kind", ["class", "method", "data"])
def test_an_object_of_another_class_of_the_host_is_refused(upstream, kind, monkeypatch):
    from toyhost import patched

    change = {
        "class": lambda changes, model: swap_class(changes, model, type("Fast", (type(model),), {})),
        "method": lambda changes, model: set_method(changes, model, lambda x: 1),
        "data": lambda changes, model: set_data(changes, model, run=lambda x: 1),
    }[kind]
    here, model = record("toyhost.model:Model.run", kind=kind), patched.Model()
    with pytest.raises(UpstreamDriftError, match=r"^toyhost.patched.Model is not what verl_qerl changes"):
        change(here, model)
    assert (type(model), vars(model)) == (patched.Model, {})
    if kind != "data":
        change((here, record("toyhost.patched:Model.run", kind=kind)), model)
    change(here, upstream.Child())
    change(here, type("Double", (), {})())  # of no host
    monkeypatch.setenv("VERL_QERL_UNTESTED_VERSIONS", "1")
    change(here, patched.Model())


def test_a_record_of_another_kind_is_refused(upstream):
    with pytest.raises(AssertionError, match="not registered as class"):
        swap_class(record("toyhost.model:Model", kind="override"), upstream.Model(), upstream.Child)
