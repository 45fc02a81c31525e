"""verl's weight transfer, in which neither end waits for the other after it has gone.

verl's two ends wait for each other's messages without a limit. A sender that fails in the middle of a stream (a weight
with NaN, no memory for a gathered tensor) closes its socket and ends the run with its error, and the receiver would
stay in its worker until that is killed. A worker that dies, or fails, would leave the actor waiting, and the run. A
closed socket, of a killed process too, is an event that zmq tells at once.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

_LOOK_MS = 1000  # between two looks at a receiver that says nothing
_require_receiver: ContextVar[Callable[[], None] | None] = ContextVar("require_receiver", default=None)


@contextlib.contextmanager
def requiring(receiver: Callable[[], None]) -> Iterator[None]:
    """Senders made inside the context call this every second while they wait; what it raises ends the transfer."""
    token = _require_receiver.set(receiver)
    try:
        yield
    finally:
        _require_receiver.reset(token)


class _Watched:
    """A socket of zmq that sees when the other end has closed its own; `_count` is of the messages that have come."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._count = 0

    def _poller(self, what: int) -> zmq.Poller:
        """Wakes when the socket is ready for `what`, or the other end has gone."""
        poller = zmq.Poller()
        poller.register(self._socket, what)
        poller.register(self._events, zmq.POLLIN)
        return poller

    def close(self) -> None:
        """Close the socket and stop watching it."""
        self._socket.disable_monitor()
        self._socket.close()


class _WatchedReceiver(_Watched):
    """A socket of verl's receiver that raises in the place of a message which will not come."""

    def recv_pyobj(self) -> Any:
        self._poller(zmq.POLLIN).poll()
        if not self._socket.poll(0):  # a message that came before the end counts
            raise RuntimeError(
                f"the actor has ended in the middle of a weight sync, after {self._count} messages. A whole stream of"
                " weights is needed. Look for the actor's own error: this engine has half of its weights."
            )
        self._count += 1
        return self._socket.recv_pyobj()

    def send(self, data: bytes) -> None:
        self._socket.send(data)


class WatchedSender(_Watched):
    """A bound REQ socket of verl's sender that raises instead of waiting for a receiver that has gone."""

    def __init__(self, socket: Any) -> None:
        super().__init__(socket)
        self._require = _require_receiver.get()

    def send_pyobj(self, message: Any) -> None:
        """Send a message once a receiver is there.

        Raises:
            RuntimeError: The receiver has closed its socket. What was given to `requiring` may raise other errors.
        """
        self._wait(zmq.POLLOUT)
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        """Wait for the answer; raises as `send_pyobj`."""
        self._wait(zmq.POLLIN)
        self._count += 1
        return self._socket.recv()

    def _wait(self, what: int) -> None:
        poller = self._poller(what)
        while not dict(poller.poll(_LOOK_MS)).get(self._socket):
            if self._events.poll(0) and not self._socket.poll(0, what):  # an answer that came before the end counts
                raise RuntimeError(
                    f"the rollout's worker has ended in the middle of a weight sync, after {self._count} answers. One"
                    " that takes all weights is needed. Look for its own error in the log above (Worker, EngineCore):"
                    " remove the cause and start again."
                )
            if self._require is not None:
                self._require()


class WatchfulReceiver(BucketedWeightReceiver):
    """BucketedWeightReceiver that raises when the sender closes its socket, or dies, before the last bucket.

    `receive_weights` raises RuntimeError then, within the time that zmq needs to see it, milliseconds.
    """

    socket: Any

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = _WatchedReceiver(self.socket)
