"""A shared base handed from the process that owns it to one other, on the same machine, GPU and account.

The owner waits at a Unix socket in a folder of its account's alone. Both sides ask the kernel who the other is, and
what goes over it is a list of what is where and one handle: CUDA IPC on a GPU, the name of shared memory on a CPU.
The borrower maps the memory and never frees it; it keeps an eye on the owner's process, with whom the memory goes.
"""

import contextlib
import logging
import os
import pickle
import select
import socket
import stat
import struct
import tempfile
import threading
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from torch.multiprocessing.reductions import reduce_tensor

from verl_qerl import __version__
from verl_qerl.modules.placement.shared_base import RepackedGroup, SharedBase, shared_by_name

logger = logging.getLogger(__name__)

_TIMEOUT_S = 60.0  # for a few thousand bytes
_REQUEST = b"?"
_LONGEST_NAME = 107  # bytes, of sun_path without its end
_DEVICE = 6  # place of the device's number among the arguments of torch's rebuild_cuda_tensor
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def meeting_place(job: str, replica: int) -> Path:
    """The socket of one rank of a run.

    Args:
        job: Ray's name of the run.
        replica: Number of the rollout replica, which is the actor's rank.

    Raises:
        RuntimeError: The name is longer than that of a socket may be.
    """
    path = Path(tempfile.gettempdir()) / f"verl_qerl-{os.getuid()}" / f"base-{job}-{replica}.sock"
    if len(os.fsencode(path)) > _LONGEST_NAME:
        what = f"{path} has more than the {_LONGEST_NAME} bytes of a socket's name"
        raise _refused(what, "Set TMPDIR to a shorter one")
    return path


class Lender:
    """Hands a base to the first that asks, and to nobody else.

    Args:
        base: From `share_base`; it must live as long as this process.

    Raises:
        RuntimeError: The folder is open to others, or another process lends there.
    """

    _taken = False

    def __init__(self, base: SharedBase, path: Path) -> None:
        self.base, self.path = base, path
        if base.flat.is_cuda:
            torch.cuda.synchronize(base.flat.device)  # the borrower's stream knows nothing of ours
        self._message = _message(base)
        _make_private(path.parent)
        _remove_stale(path)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._wait, name="verl_qerl base", daemon=True)
        self._thread.start()

    def check_taken(self) -> None:
        """Raise RuntimeError if nobody has asked for the base."""
        if not self._taken:
            raise _refused(
                "the rollout holds a base of its own", "Leave engine_kwargs.vllm.model_loader_extra_config out"
            )

    def _wait(self) -> None:
        with self._socket:
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError):  # a borrower that went away says so itself
                    connection.settimeout(_TIMEOUT_S)
                    pid, uid = _peer(connection)
                    if uid != os.getuid():
                        logger.warning("verl_qerl: process %d of user %d asked for the base and got nothing", pid, uid)
                        continue
                    if connection.recv(1) != _REQUEST:
                        continue  # another run that looks whether anybody is here
                    self.path.unlink(missing_ok=True)
                    connection.sendall(struct.pack("Q", len(self._message)) + self._message)
                    self._taken = True
                    return


@dataclass(frozen=True)
class Borrowed:
    """A base that another process owns.

    Attributes:
        base: Mapped, not copied; nothing may write there.
    """

    base: SharedBase
    pid: int
    _owner: int  # file descriptor that becomes readable when the owner ends

    def check(self) -> None:
        """Raise RuntimeError if the owner has ended."""
        poll = select.poll()
        poll.register(self._owner, select.POLLIN)
        if poll.poll(0):
            raise RuntimeError(
                f"the actor that owns the packed base has ended: process {self.pid}, qerl.base.share=true. The rollout"
                " computes with its memory and cannot go on. Look for the actor's own error, and start the run again."
            )


def borrow(path: Path, device: torch.device) -> Borrowed:
    """Map the base that a `Lender` has.

    Args:
        device: The owner's GPU, as this process names it.

    Raises:
        RuntimeError: Nobody lends there, or somebody whose base cannot be used; the message says what differs.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(str(path))
            pid, uid = _peer(connection)
            owner = os.pidfd_open(pid)
            message = _receive(connection) if uid == os.getuid() else b""
        except OSError as error:
            raise _refused(
                f"no actor lends its base at {path} ({error})",
                "Start it with +qerl.base.share=true on both sides, actor and rollout on the same machine",
            ) from error
    if uid != os.getuid():
        raise _refused(f"{path} belongs to process {pid} of user {uid}", "Remove it")
    found = pickle.loads(message)
    mine = {"version": __version__, "device": _identity(device)}
    differing = [f"{key} {found[key]}, not {value}" for key, value in mine.items() if found[key] != value]
    if differing:
        raise _refused(f"the actor has {'; '.join(differing)}", "Give each rollout replica the GPU of its actor rank")
    rebuild, arguments = found["handle"]
    if device.type == "cuda":
        arguments = (*arguments[:_DEVICE], device.index or 0, *arguments[_DEVICE + 1 :])
    groups = tuple(RepackedGroup(*group) for group in found["groups"])
    return Borrowed(SharedBase(rebuild(*arguments), groups), pid, owner)


def _refused(what: str, remedy: str) -> RuntimeError:
    return RuntimeError(
        f"the packed base cannot be shared: qerl.base.share=true, {what}. Actor and rollout of one run on one GPU are"
        f" needed. {remedy}, or leave +qerl.base.share out."
    )


def _message(base: SharedBase) -> bytes:
    with shared_by_name():  # torch asks once more how it is to be handed over
        content = {
            "version": __version__,
            "device": _identity(base.flat.device),
            "groups": [(group.members, group.rows, group.columns, group.offset) for group in base.groups],
            "handle": reduce_tensor(base.flat),
        }
        return bytes(ForkingPickler.dumps(content))


def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def _peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other side, from the kernel."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def _receive(connection: socket.socket) -> bytes:
    connection.sendall(_REQUEST)
    with connection.makefile("rb") as stream:
        size = stream.read(8)
        message = stream.read(struct.unpack("Q", size)[0]) if len(size) == 8 else b""
    if len(size) < 8 or len(message) < struct.unpack("Q", size)[0]:
        raise ConnectionError("it hung up")
    return message


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise _refused(f"{folder} is not a folder of this account alone, with mode 0700", "Remove it")


def _remove_stale(path: Path) -> None:
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:  # what a process that was killed left behind
            path.unlink()
            return
    raise _refused(f"another process lends its own at {path}", "End the other run, or set TMPDIR for this one")
