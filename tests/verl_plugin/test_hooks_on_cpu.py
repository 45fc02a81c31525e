import importlib
import inspect
import sys
import textwrap

import pytest

from verl_qerl.verl_plugin import hooks

INSTALLER = """
    import sys
    calls = []
    def install(module):
        calls.append((module.__name__, module.LAST))
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes modules that can be imported; they and what waits for them are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hooks, "_waiting", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    written = []

    def write(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
            written.append(name)
        importlib.invalidate_caches()

    yield write
    for name in written:
        sys.modules.pop(name, None)


def calls(name):
    return sys.modules[name].calls if name in sys.modules else []


def test_installs_after_the_import_and_not_before(write):
    write(hooked="FIRST = 1\nLAST = 2\n", installer=INSTALLER)
    hooks.when_imported("hooked", "installer")
    assert "hooked" not in sys.modules
    assert "installer" not in sys.modules  # the import of ours waits as well
    importlib.import_module("hooked")
    assert calls("installer") == [("hooked", 2)]


def test_the_finder_goes_when_nothing_is_waited_for(write):
    write(hooked="LAST = 1\n", other="LAST = 2\n", installer=INSTALLER)
    for name in ("hooked", "other"):
        hooks.when_imported(name, "installer")
    left = []
    for name in ("hooked", "other"):
        importlib.import_module(name)
        left.append(sum(isinstance(finder, hooks._Finder) for finder in sys.meta_path))
    assert left == [1, 0]
    assert calls("installer") == [("hooked", 1), ("other", 2)]


def test_installs_at_once_in_an_imported_module(write):
    write(hooked="LAST = 3\n", installer=INSTALLER)
    importlib.import_module("hooked")
    hooks.when_imported("hooked", "installer")
    assert calls("installer") == [("hooked", 3)]


def test_installs_once_a_name(write):
    write(hooked="LAST = 4\n", installer=INSTALLER)
    hooks.when_imported("hooked", "installer")
    hooks.when_imported("hooked", "installer")
    assert sum(isinstance(finder, hooks._Finder) for finder in sys.meta_path) == 1
    importlib.import_module("hooked")
    importlib.import_module("hooked")
    assert calls("installer") == [("hooked", 4)]


def test_installers_of_one_module_run_in_order(write):
    write(hooked="LAST = []\n", first=INSTALLER, second=INSTALLER)
    for name, value in (("first", 1), ("second", 2)):
        hooks.when_imported("hooked", name)
        module = importlib.import_module(name)
        module.install = lambda hooked, value=value: hooked.LAST.append(value)
    assert importlib.import_module("hooked").LAST == [1, 2]


def test_a_hook_set_while_the_module_loads_waits_for_its_end(write):
    write(
        hooked="from verl_qerl.verl_plugin import hooks\nhooks.when_imported('hooked', 'second')\nLAST = 5\n",
        first=INSTALLER,
        second=INSTALLER,
    )
    hooks.when_imported("hooked", "first")
    importlib.import_module("hooked")
    assert calls("first") == calls("second") == [("hooked", 5)]


def test_submodules_are_hooked_without_their_package(write, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "part.py").write_text("LAST = 6\n")
    write(installer=INSTALLER)
    hooks.when_imported("package.part", "installer")
    importlib.import_module("package")
    assert calls("installer") == []
    importlib.import_module("package.part")
    assert calls("installer") == [("package.part", 6)]
    del sys.modules["package"], sys.modules["package.part"]


def test_the_rest_of_the_loader_is_intact(write):
    source = "def f():\n    return 7\n\n\nLAST = 7\n"
    write(hooked=source, installer=INSTALLER)
    hooks.when_imported("hooked", "installer")
    module = importlib.import_module("hooked")
    assert inspect.getsource(module.f) == "def f():\n    return 7\n"
    assert module.__loader__.get_source("hooked") == source
    assert module.__loader__.is_package("hooked") is False
    assert module.__spec__.origin == module.__file__


def test_an_error_in_install_propagates_and_comes_again(write):
    write(hooked="LAST = 8\n", installer="def install(module):\n    raise RuntimeError('drifted')\n")
    hooks.when_imported("hooked", "installer")
    for _ in range(2):  # a caller that tries again must not get the module without our part
        with pytest.raises(RuntimeError, match="drifted"):
            importlib.import_module("hooked")
        assert "hooked" not in sys.modules


def test_other_modules_are_left_to_their_finders(write):
    write(other="LAST = 9\n", installer=INSTALLER)
    hooks.when_imported("hooked", "installer")
    assert not isinstance(importlib.import_module("other").__loader__, hooks._Loader)
    with pytest.raises(ModuleNotFoundError, match="No module named 'hooked'"):
        importlib.import_module("hooked")
