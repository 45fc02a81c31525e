"""verl's weight transfer, whose receiver does not wait for a sender that has gone.

verl's two ends wait for each other's messages without a limit. A sender that fails in the middle of a stream (a weight
with NaN, no memory for a gathered tensor) closes its socket and ends the run with its error, and the receiver would
stay in its worker until that is killed. A closed socket, of a killed process too, is an event that zmq tells at once.
"""

from typing import Any

import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver


class _Watched:
    """A socket of verl's receiver that raises in the place of a message which will not come."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._num_messages = 0

    def recv_pyobj(self) -> Any:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        poller.poll()
        if not self._socket.poll(0):  # a message that came before the end counts
            raise RuntimeError(
                f"the actor has ended in the middle of a weight sync, after {self._num_messages} messages. A whole"
                " stream of weights is needed. Look for the actor's own error: this engine has half of its weights."
            )
        self._num_messages += 1
        return self._socket.recv_pyobj()

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()


class WatchfulReceiver(BucketedWeightReceiver):
    """BucketedWeightReceiver that raises when the sender closes its socket, or dies, before the last bucket.

    `receive_weights` raises RuntimeError then, within the time that zmq needs to see it, milliseconds.
    """

    socket: Any

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = _Watched(self.socket)
