import pytest


@pytest.fixture(scope="session", autouse=True)
def ours_takes_part():
    """verl's registries hold our trainers and our loss, as in a run with an option of ours."""
    pytest.importorskip("verl")
    from verl_qerl import verl_plugin

    verl_plugin.activate()
