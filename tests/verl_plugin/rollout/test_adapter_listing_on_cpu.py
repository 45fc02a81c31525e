import asyncio

import pytest

from verl_qerl.verl_plugin.rollout import adapter_listing
from verl_qerl.verl_plugin.rollout.adapter_listing import AdapterListing


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(adapter_listing, "_LOOK_S", 0.01)


class Engine:
    """Counts what its workers are asked; `silent` leaves them without an answer."""

    def __init__(self):
        self.asked, self.loras, self.errored, self.silent, self.dead_error = 0, {1}, False, False, ValueError("dead")
        self.waits = 0.0

    async def list_loras(self):
        self.asked += 1
        await asyncio.sleep(self.waits)
        if self.silent:
            await asyncio.get_running_loop().create_future()
        if self.errored:
            raise self.dead_error
        return set(self.loras)

    async def collective_rpc(self, method, loras=None):
        await asyncio.sleep(0.01)
        self.loras = loras if loras is not None else self.loras
        return [method]

    add_lora = remove_lora = collective_rpc


def run(scenario):
    async def start():
        engine = Engine()
        AdapterListing(engine)
        return await scenario(engine)

    return asyncio.run(start())


def test_requests_ask_once():
    async def scenario(engine):
        engine.waits = 0.01
        found = await asyncio.gather(*(engine.list_loras() for _ in range(8)))
        return [*found, await engine.list_loras()], engine.asked

    assert run(scenario) == ([{1}] * 9, 1)


@pytest.mark.parametrize("name", ["collective_rpc", "add_lora", "remove_lora"])
def test_a_call_that_may_change_the_answer_is_followed_by_a_question(name):
    async def scenario(engine):
        before = await engine.list_loras()
        answer = await getattr(engine, name)("update", loras=set())
        return before, answer, await engine.list_loras(), engine.asked

    assert run(scenario) == ({1}, ["update"], set(), 2)


def test_what_was_asked_while_the_workers_changed_is_not_kept():
    async def scenario(engine):
        update = asyncio.ensure_future(engine.collective_rpc("update", loras={2}))
        await asyncio.sleep(0)
        during = await engine.list_loras()
        await update
        return during, await engine.list_loras()

    assert run(scenario) == ({1}, {2})


def test_an_engine_that_ends_leaves_no_request_waiting():
    async def scenario(engine):
        engine.silent = True
        waiting = [asyncio.ensure_future(engine.list_loras()) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        engine.errored = True
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)

    assert [str(error) for error in run(scenario)] == ["dead"] * 2


def test_an_error_is_not_remembered():
    async def scenario(engine):
        engine.errored = True
        with pytest.raises(ValueError, match="dead"):
            await engine.list_loras()
        engine.errored = False
        return await engine.list_loras()

    assert run(scenario) == {1}
