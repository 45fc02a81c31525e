"""New weights for a running engine, bucket by bucket and in place, through vLLM's layer-wise reload.

vLLM puts a layer on the meta device, collects its tensors, processes them for the kernel and copies the result into the
storage that CUDA graphs hold. It tolerates what must not happen here: a layer without new weights keeps the old ones
(after a sleep at level 2: nothing at all), a fused linear may lack a member, a name nobody knows is skipped. So names
are compared with those of the model, checksums with those of the sender, and the kernels are asked what they hold: all
of them at the first sync, those of one layer at each later one, in turn (`kernel_check.py`).
"""

import contextlib
import logging
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.utils.torch_utils import set_default_torch_dtype

from verl_qerl import upstream
from verl_qerl.checkpoints.manifest import NAME as MANIFEST
from verl_qerl.checkpoints.manifest import Manifest, checksum, read_checksums
from verl_qerl.formats import WeightFormat
from verl_qerl.formats.reference import dequantize
from verl_qerl.vllm_plugin import hosts
from verl_qerl.vllm_plugin.weights.kernel_check import holds
from verl_qerl.vllm_plugin.weights.loader import checkpoint_members, fused_members

logger = logging.getLogger(__name__)

# What loading raises; kept until the transfer has ended.
LOADING_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def without_frames(error: Exception) -> Exception:
    """An error to keep until a transfer has ended, without the frames it went through; they go to the log.

    Frames hold views of the bucket, and verl gives shared memory back only when nobody looks into it: it would fail
    with an error of its own, and this one would be lost.
    """
    logger.error("verl_qerl: a bucket of weights cannot be loaded.\n%s", "".join(traceback.format_exception(error)))
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


@dataclass(frozen=True)
class SyncReport:
    """The numbers of one weight sync.

    Attributes:
        num_linears: Quantized linears of vLLM's model.
        num_checked: How many of them were asked what they hold.
    """

    manifest: Manifest
    num_linears: int
    num_checked: int


class InPlaceReload:
    """One sync. Call `load` with each bucket, then `finish`.

    An error is kept until `finish`, and what comes after it is ignored: the sender waits for an answer to every bucket.

    Args:
        num_before: Syncs of this engine before this one.
    """

    def __init__(self, model: Any, vllm_config: VllmConfig, form: WeightFormat, num_before: int) -> None:
        self._model, self._vllm_config, self._form = model, vllm_config, form
        self._error: Exception | None = None
        self._manifest: Manifest | None = None
        self._sums: dict[str, torch.Tensor] = {}
        self._linears: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, LinearBase) and getattr(module, "scheme", None) is not None
        }
        self._tied_heads = tied_heads(model)
        self._num_checked = 0
        # Workspaces and the like, which are no parameters: vLLM makes new ones, captured graphs go on using the old.
        self._plain_tensors = {name: _plain_tensors(linear) for name, linear in self._linears.items()}
        with self._context():
            initialize_layerwise_reload(model)
        # On the meta device the model has the names of a checkpoint, and each head a parameter of its own, tied or not.
        parameters = dict(model.named_parameters())
        self._dtypes = {
            member: parameters[name].dtype
            for name, members in checkpoint_members(model).items()
            for member in members
            if name.rpartition(".")[0] not in self._tied_heads
        }
        self._members = {name: fused_members(model, name) for name in _looked_at(list(self._linears), num_before)}
        # Linear that is still to be looked at -> all that has to come before, bias included: then vLLM processes it.
        self._awaited = {
            name: {one for one in self._dtypes if one.rpartition(".")[0] in members}
            for name, members in self._members.items()
        }
        self._kept: dict[str, torch.Tensor] = {}  # tensors of these linears

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load a bucket; its memory may be overwritten afterwards."""
        if self._error is None:
            try:
                self._load(tensors)
            except LOADING_ERRORS as error:
                self._error = without_frames(error)

    def finish(self) -> SyncReport:
        """Process what is left and check that the model holds what was sent.

        Raises:
            ValueError: It does not; the message says what differs. The engine cannot be used any more.
        """
        if self._error is not None:
            raise self._error
        manifest = self._check_transfer()
        with self._context(), _without_warnings():
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)
            for name, (head, embedding) in self._tied_heads.items():
                _follow(name, head, embedding)
        for name, linear in self._linears.items():
            _keep_plain_tensors(name, linear, self._plain_tensors[name])
        self._check_held()
        return SyncReport(manifest, len(self._linears), self._num_checked)

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        weights = []
        for name, tensor in tensors:
            if name == MANIFEST:
                self._manifest = Manifest.from_tensor(tensor)
                continue
            wrong = self._wrong(name, tensor)
            if wrong:
                raise ValueError(
                    f"the actor sent {name!r}, {wrong}. The parameters of {type(self._model).__name__} are accepted,"
                    f" each once, its linears in {self._form.kind}. Check that both sides have the same options."
                )
            copy = tensor.clone()  # vLLM keeps it until its layer is whole
            self._sums[name] = checksum(copy)
            if any(name in names for names in self._awaited.values()):
                self._kept[name] = copy
            weights.append((name, copy))
        with self._context():
            self._model.load_weights(weights)
        self._check_held()

    def _wrong(self, name: str, tensor: torch.Tensor) -> str | None:
        if name not in self._dtypes:
            return "which the rollout lacks"
        if name in self._sums:
            return "a second time"
        wanted = self._dtypes[name]
        return None if tensor.dtype == wanted else f"in {tensor.dtype} instead of {wanted}"

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """What vLLM has around its own loading: the configuration, the dtype and the device of new tensors."""
        device: Any = self._vllm_config.device_config.device
        dtype: Any = self._vllm_config.model_config.dtype
        with set_current_vllm_config(self._vllm_config), set_default_torch_dtype(dtype), torch.device(device):
            yield

    def _check_transfer(self) -> Manifest:
        if self._manifest is None:
            raise ValueError(
                "the actor sent no list of its tensors: it does not quantize for this rollout. An actor of verl_qerl is"
                " needed. Check that `+rollout=...` is the same for both and that every node has the same verl_qerl."
            )
        lost = sorted(set(self._dtypes) - set(self._sums))
        if lost:
            raise ValueError(
                f"the sync left out {len(lost)} of {len(self._dtypes)} tensors of the rollout, first {lost[0]!r}."
                " All are needed. Check that actor and rollout have the same model and options."
            )
        found = read_checksums(self._sums)
        differing = sorted(name for name, value in found.items() if self._manifest.checksums.get(name) != value)
        if differing or len(found) != len(self._manifest.checksums):
            raise ValueError(
                f"{len(differing)} of {len(found)} tensors arrived otherwise than the actor sent them, first"
                f" {(differing or ['-'])[0]!r}. Equal checksums are needed. Update the GPU's driver or set"
                " NCCL_P2P_DISABLE=1 if this comes again."
            )
        return self._manifest

    def _check_held(self) -> None:
        for name in [name for name, wanted in self._awaited.items() if wanted <= self._kept.keys()]:
            came = {one: self._kept.pop(one) for one in self._awaited.pop(name)}
            parts = [{part: came[f"{member}.{part}"] for part in self._form.parts} for member in self._members[name]]
            packed = (self._form.from_tensors(repr(name), one) for one in parts)
            if not holds(self._linears[name], [dequantize(one, torch.float32) for one in packed]):
                raise ValueError(
                    f"the rollout's linear {name!r} does not hold what the actor sent. The same weights are needed."
                    " This is a defect of verl_qerl or vLLM: report it with the model and both versions."
                )
            self._num_checked += 1


def tied_heads(model: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
    """Name -> (head, embedding) of the heads that are modules of their own and have the weight of an embedding."""
    vocabularies = {
        name: module for name, module in model.named_modules() if isinstance(module, VocabParallelEmbedding)
    }
    return {
        name: (head, embedding)
        for name, head in vocabularies.items()
        if isinstance(head, ParallelLMHead)
        for embedding in vocabularies.values()
        if embedding is not head and embedding.weight is head.weight
    }


def _follow(name: str, head: Any, embedding: Any) -> None:
    """Make a tied head compute with the new embedding, whose weight both share again."""
    if head.weight is not embedding.weight:
        raise ValueError(
            f"vLLM untied {name!r} from the embedding while it reloaded, so that it has older weights. One weight for"
            " both is needed. This is a defect of verl_qerl or vLLM: report it with the model and both versions."
        )
    # vLLM does this for what it loads alone, and a head that is tied is not loaded. A CPU's kernels hold a copy.
    head.quant_method.process_weights_after_loading(head)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Layers without weights (rotary embeddings) make vLLM warn at every reload; our checks see lost weights."""

    def keep(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    log = logging.getLogger(finalize_layerwise_reload.__module__)
    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def _looked_at(names: list[str], num_before: int) -> list[str]:
    """The linears to check: all of them at the first sync, those of one layer at later ones."""
    if num_before == 0:
        return names
    layers = sorted({int(number) for name in names for number in re.findall(r"\.layers\.(\d+)\.", f".{name}.")})
    turn = layers[(num_before - 1) % len(layers)]
    return [name for name in names if f".layers.{turn}." in f".{name}."]


def _plain_tensors(linear: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(linear).items() if isinstance(value, torch.Tensor)}


def _keep_plain_tensors(name: str, linear: Any, before: dict[str, torch.Tensor]) -> None:
    for key, old in before.items():
        new = getattr(linear, key, None)
        if new is old:
            continue
        if not isinstance(new, torch.Tensor) or new.shape != old.shape or new.dtype != old.dtype:
            raise ValueError(
                f"vLLM replaced {key!r} of {name!r} by something else while it reloaded. The same shape is needed,"
                " since CUDA graphs use it. Start the rollout with enforce_eager=True, and report this."
            )
        old.copy_(new)
        upstream.set_data(hosts.RELOADED, linear, **{key: old})
