"""vLLM returns each answer once, when it is whole, and as tokens alone (patches/verl/0016).

verl's server asks for what there is of an answer after every token, with its text and with a dictionary of log-probs
for each token, and uses the tokens and log-probs of the last one. The process in front of the engine makes all of that,
on one thread for all sequences.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl_qerl import upstream
from verl_qerl.vllm_plugin import hosts


class FinalOutputs:
    """Takes the place of `AsyncLLM.add_request`, for the requests of `asking`.

    verl counts a request as admitted at its first output, and does not abort requests before. Theirs is an empty one,
    as soon as the engine has the request.
    """

    def __init__(self, engine: Any) -> None:
        self._add, self._asked = engine.add_request, set[str]()
        upstream.set_method(hosts.ADD_REQUEST, engine, self)

    async def __call__(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
        """Add a request; returns vLLM's collector of its outputs."""
        from vllm import RequestOutput

        collector = await self._add(request_id, *args, **kwargs)
        if request_id in self._asked and collector.output is None:
            collector.put(RequestOutput(request_id, None, None, None, [], finished=False))
        return collector

    @contextmanager
    def asking(self, request_id: str, sampling_params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """While a request is put to verl's server: its sampling parameters.

        Args:
            sampling_params: What they set themselves is kept; requests with stop strings need the text.
        """
        from vllm.sampling_params import RequestOutputKind

        wanted: dict[str, Any] = {"output_kind": RequestOutputKind.FINAL_ONLY}
        if not sampling_params.get("stop"):
            wanted["detokenize"] = False
        if sampling_params.get("prompt_logprobs") is None:  # verl reads those in the other form
            wanted["flat_logprobs"] = True
        self._asked.add(request_id)
        try:
            yield wanted | sampling_params
        finally:
            self._asked.discard(request_id)
