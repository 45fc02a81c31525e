"""One process owns the bytes, another computes with them: real processes, real shared memory, a real kill."""

import contextlib
import socket
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from qerl_testing import random_qwen2

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.kernels.rollout.repacking import undo_repack
from verl_qerl.modules.placement import lending
from verl_qerl.modules.placement.lending import Lender, borrow, meeting_place
from verl_qerl.modules.placement.shared_base import RepackedGroup, SharedBase

pytestmark = pytest.mark.usefixtures("sockets")

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path) -> Path:
    random_qwen2(intermediate_size=192).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def owner(lend, model):
    return lend(model, "job")


def small_base() -> SharedBase:
    """64 rows of 16, in shared memory."""
    group = RepackedGroup(("o_proj",), (64,), 16, 0)
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    flat = torch.zeros(group.num_bytes, dtype=torch.uint8).share_memory_()
    torch.multiprocessing.set_sharing_strategy(before)
    return SharedBase(flat, (group,))


def test_two_processes_see_the_same_bytes(owner):
    borrowed = borrow(meeting_place("job", 0), CPU)
    flat = borrowed.base.flat
    assert borrowed.pid == owner.process.pid
    whole = owner.tell("whole")
    found = {
        name: weight_digest(undo_repack(*tiles))
        for group in borrowed.base.groups
        for name, tiles in zip(group.members, group.member_tiles(flat), strict=True)
    }
    assert found == whole
    assert len(found) == 14
    before = int(flat[1000])
    assert owner.tell("flip 1000") == before ^ 0x11 == int(flat[1000])
    flat[1001] = 77
    assert owner.tell("read 1001") == 77
    borrowed.check()


def test_an_owner_that_is_killed_is_noticed_and_its_bytes_do_not_vanish_under_a_step(owner):
    borrowed = borrow(meeting_place("job", 0), CPU)
    copy = borrowed.base.flat.clone()
    owner.kill()
    with pytest.raises(
        RuntimeError, match=rf"^the actor .* has ended: process {owner.process.pid}, qerl\.base\.share=true\."
    ):
        borrowed.check()
    assert torch.equal(borrowed.base.flat, copy)


def test_the_first_that_asks_gets_it_and_nobody_else(owner):
    path = meeting_place("job", 0)
    borrow(path, CPU)
    with pytest.raises(RuntimeError, match="no actor lends its base at"):
        borrow(path, CPU)
    assert not path.exists()


def test_a_base_that_nobody_asked_for_is_noticed():
    lender = Lender(small_base(), meeting_place("x", 0))
    with pytest.raises(RuntimeError, match="the rollout holds a base of its own"):
        lender.check_taken()
    borrow(lender.path, CPU)
    lender._thread.join(60)
    lender.check_taken()


def test_each_rank_has_a_place_of_its_own():
    assert len({meeting_place(job, replica) for job in ("01", "02") for replica in (0, 1)}) == 4


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("__version__", "9", r"the actor has version .*, not 9\."), ("_identity", lambda device: "GPU-1", "not GPU-1")],
    ids=["version", "device"],
)
def test_a_base_of_another_version_or_gpu_is_refused(monkeypatch, name, value, message):
    Lender(small_base(), meeting_place("x", 0))
    monkeypatch.setattr(lending, name, value)
    with pytest.raises(RuntimeError, match=message):
        borrow(meeting_place("x", 0), CPU)


def test_a_name_that_is_too_long_for_a_socket_is_refused():
    # A socket takes a name of 107 bytes, and no longer one.
    at, rest = Path(tempfile.gettempdir()), len(str(meeting_place("", 0)))
    longest = meeting_place("x" * (107 - rest), 0)
    assert len(str(longest)) == 107
    lender = Lender(small_base(), longest)
    assert lender.path.is_socket()
    with pytest.raises(
        RuntimeError, match=rf"qerl\.base\.share=true, {at}\S+ has more than the 107 bytes .* Set TMPDIR to a"
    ):
        meeting_place("x" * (108 - rest), 0)


def test_another_user_gets_nothing_and_is_not_believed(monkeypatch):
    """What the kernel says of the other side decides, on both sides."""
    path, real, strange = meeting_place("x", 0), lending._peer, []

    def peer(connection):
        pid, uid = real(connection)
        return pid, uid + (threading.current_thread() in strange)

    monkeypatch.setattr(lending, "_peer", peer)
    lender = Lender(small_base(), path)
    strange.append(threading.current_thread())
    with pytest.raises(RuntimeError, match=r"belongs to process \d+ of user \d+"):
        borrow(path, CPU)
    strange[:] = [lender._thread]
    with pytest.raises(RuntimeError, match="no actor lends its base"):
        borrow(path, CPU)
    strange.clear()
    assert borrow(path, CPU).base.groups == lender.base.groups


def test_a_folder_that_others_may_enter_is_refused():
    path = meeting_place("x", 0)
    path.parent.mkdir(mode=0o700)
    path.parent.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"is not a folder of this account alone, with mode 0700\. .* Remove it, or"):
        Lender(small_base(), path)


def test_what_a_killed_run_left_is_replaced_and_a_living_one_is_not():
    path = meeting_place("x", 0)
    path.parent.mkdir(mode=0o700)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(path))
    Lender(small_base(), path)
    with pytest.raises(RuntimeError, match="another process lends its own at"):
        Lender(small_base(), path)
    assert borrow(path, CPU).base.flat.numel() == small_base().flat.numel()


def test_an_answer_that_is_cut_short_is_no_base(monkeypatch):
    monkeypatch.setattr(lending, "_message", lambda base: b"")
    Lender(small_base(), meeting_place("x", 0))
    monkeypatch.setattr(lending.struct, "pack", lambda form, size: b"\x07")
    with pytest.raises(RuntimeError, match=r"no actor lends its base at .* \(it hung up\)"):
        borrow(meeting_place("x", 0), CPU)
