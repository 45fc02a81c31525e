"""Sizes of a decoder, as config.json has them, and what follows for its weights and for the passes of an actor."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_qerl.checkpoints.experts import FAMILIES, LINEARS, number_of_experts, states_experts
from verl_qerl.checkpoints.model_config import senses

# Families of transformers whose MLP is two linears, with names of their own.
_WITHOUT_GATE = ("apertus", "arcee", "gpt_neox", "nemotron", "persimmon", "phi", "starcoder2")
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
# The linears of a layer, in the order of ModelShape.linears; a fused one stands in the place of each part.
_ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
_FUSED_MLP = ("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj")
_LINEARS = (*_ATTENTION, *(f"mlp.{name}" for name in LINEARS))
_FUSED: dict[str, tuple[str, ...]] = {"phi3": (*["self_attn.qkv_proj"] * 3, "self_attn.o_proj", *_FUSED_MLP)}
_FUSED |= dict.fromkeys(("glm", "glm4"), (*_ATTENTION, *_FUSED_MLP))


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, dense or a mixture of experts. Norms, biases and routers are left out.

    Attributes:
        hidden, intermediate, layers, vocabulary: As in config.json.
        query, key_value: Outputs of q and of k, heads times their size.
        tied: Whether embedding and head are one tensor.
        sparse: Which of the layers have experts in the place of gate, up and down.
        experts, experts_per_token: In such a layer, and of them for a token.
        expert_intermediate: Outputs of the gate of one.
        linear_names: Names in a layer of q, k, v, o, gate, up and down, as `self_attn.q_proj`; those that are parts of
            one linear have its name. A layer with experts has the first four.
    """

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    query: int
    key_value: int
    tied: bool = False
    sparse: tuple[int, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    linear_names: tuple[str, ...] = _LINEARS

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read config.json; where it leaves `tie_word_embeddings` out, they are two tensors.

        Raises:
            ValueError: It is no model of text alone, a size is missing or no number, heads have no columns, the experts
                are of a family that is not supported, or the MLP has no gate.
        """
        parts = senses(config)
        if parts:
            raise ValueError(
                f"no plan for this model: its config.json has {parts[0]}, and +rollout=... does not quantize what sees"
                " or hears. Models of text alone are accepted. Choose one."
            )
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
        family = config.get("model_type")
        if family in _WITHOUT_GATE:
            raise ValueError(
                f"no plan for this model: the MLP of model_type={family} has no gate, and gate, up and down are what is"
                " counted. Other dense decoders are accepted. Use one of them; a run needs no plan."
            )
        sparse = family in FAMILIES
        if sparse:
            config = {**config, "num_experts": number_of_experts(config)}
        given = [name for name in ("head_dim", "num_key_value_heads", "decoder_sparse_step") if config.get(name)]
        sizes = {name: config.get(name) for name in (*names, *given, *(_EXPERTS if sparse else ()))}
        wrong = [name for name, size in sizes.items() if not isinstance(size, int) or size < 1]
        if wrong:
            raise ValueError(
                f"no plan for this model: its config.json has no size as {', '.join(wrong)}. Whole numbers above 0 are"
                " accepted. Check the file."
            )
        if not sparse and states_experts(config):
            raise ValueError(
                f"no plan for this model: it is a mixture of experts with model_type={family}. Dense decoders and"
                f" {', '.join(FAMILIES)} are accepted. Use one of them."
            )
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        if not size:
            raise ValueError(
                f"no plan for this model: its config.json has {heads} attention heads and hidden_size="
                f"{config['hidden_size']}, and no head_dim. At most as many heads are accepted. Check the file."
            )
        return cls(
            *(config[name] for name in names[:4]),
            query=heads * size,
            key_value=(config.get("num_key_value_heads") or heads) * size,
            tied=bool(config.get("tie_word_embeddings")),
            linear_names=_FUSED.get(str(family), _LINEARS),
            **_sizes_of_experts(config) if sparse else {},
        )

    @property
    def attention(self) -> tuple[tuple[int, int], ...]:
        """(out_features, in_features) of q, k, v and o."""
        h, q, kv = self.hidden, self.query, self.key_value
        return (q, h), (kv, h), (kv, h), (h, q)

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(out_features, in_features) of q, k, v, o, gate, up and down of a layer without experts."""
        h, i = self.hidden, self.intermediate
        return (*self.attention, (i, h), (i, h), (h, i))

    @property
    def layer_weights(self) -> int:
        """Weights of the packed linears of a layer without experts."""
        return sum(N * K for N, K in self.linears)

    @property
    def attention_weights(self) -> int:
        """Weights of q, k, v and o of a layer."""
        return sum(N * K for N, K in self.attention)

    @property
    def gate_up_weights(self) -> int:
        """Weights of the gates and ups of a layer's experts, which are decoded together; 0 without experts."""
        return self.experts * 2 * self.expert_intermediate * self.hidden

    @property
    def packed_weights(self) -> int:
        """Weights of all linears of the layers, which are packed where none is left in bf16."""
        downs = self.gate_up_weights // 2
        sparse = self.attention_weights + self.gate_up_weights + downs
        return (self.layers - len(self.sparse)) * self.layer_weights + len(self.sparse) * sparse

    def names(self, layer: int) -> list[str]:
        """Linears of a layer as a checkpoint names them, ordered as `linears`; with experts those of the attention."""
        return [f"model.layers.{layer}.{name}" for name in self.linear_names[: 4 if layer in self.sparse else None]]

    def left_in_bf16(self, ignore: Iterable[str]) -> list[int]:
        """For each layer the weights of its linears that rules of `ignore` leave in bf16; experts are always packed."""
        from verl_qerl.formats.ignore import is_packed_module  # which imports torch, and `tune --help` waits

        rules = tuple(ignore)
        return [
            sum(
                N * K
                for name, (N, K) in zip(self.names(layer), self.linears, strict=False)
                if not is_packed_module(name, rules)
            )
            for layer in range(self.layers)
        ]

    def modules(self) -> dict[str, tuple[int, int]]:
        """Name in a checkpoint -> (out_features, in_features) of every matrix but the head, routers and experts too."""
        found = {"model.embed_tokens": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            found |= _by_name(self.names(layer), self.linears)
        h, i = self.hidden, self.expert_intermediate
        for mlp in (f"model.layers.{layer}.mlp" for layer in self.sparse):
            found[f"{mlp}.gate"] = (self.experts, h)
            for e in range(self.experts):
                found |= {f"{mlp}.experts.{e}.{name}": (h, i) if name == "down_proj" else (i, h) for name in LINEARS}
        return found

    @property
    def head_weights(self) -> int:
        """Weights of embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def adapted(self) -> dict[str, tuple[int, int]]:
        """Name in a layer -> (out_features, in_features) of the linears that may carry an adapter."""
        return _by_name(self.linear_names, self.attention if self.experts else self.linears)

    @property
    def adapted_features(self) -> int:
        """Inputs and outputs of all linears that carry an adapter: with experts, those of the attention."""
        return self.layers * sum(N + K for N, K in self.adapted.values())

    @property
    def decoded_weights(self) -> int:
        """The most weights that are decoded at once in a checkpointed layer: its own, of experts all gates and ups."""
        sparse = self.attention_weights + self.gate_up_weights  # without experts less than the layer
        return max(sparse, self.layer_weights) if len(self.sparse) < self.layers else sparse

    @property
    def largest_linear(self) -> int:
        """The most weights that are decoded at once where each linear is decoded by itself, gates and ups together."""
        dense = self.linears if len(self.sparse) < self.layers else self.attention
        return max(*(N * K for N, K in dense), self.gate_up_weights)

    def saved_bytes(self) -> list[int]:
        """Bytes a token that each layer saves for backward: an estimate, of transformers' Qwen2, Llama and Qwen3-MoE.

        Two norms (float32 twice, bf16 once), q, k and v before and after the rotation, what attention gives, gate, its
        activation, up and their product; of each expert of a token also what goes in and comes out.
        """
        h, kv = self.hidden, self.key_value
        attention = 2 * 10 * h + 2 * (3 * self.query + 4 * kv)
        dense = attention + 4 * 2 * self.intermediate
        sparse = attention + self.experts_per_token * (4 * 2 * self.expert_intermediate + 2 * 2 * h)
        return [dense] * (self.layers - len(self.sparse)) + [sparse] * len(self.sparse)


def _by_name(names: Iterable[str], sizes: Iterable[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Name -> (out_features, in_features), of a fused linear all outputs; of as many as both have."""
    found: dict[str, tuple[int, int]] = {}
    for name, (N, K) in zip(names, sizes, strict=False):
        found[name] = (found.get(name, (0, K))[0] + N, K)
    return found


def _sizes_of_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers makes of them, and in which layers."""
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    sparse = [i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0]
    names = ("experts", "experts_per_token", "expert_intermediate")
    found = dict(zip(names, (config[name] for name in _EXPERTS), strict=True))
    return found | {"sparse": tuple(sparse)} if sparse else {}
