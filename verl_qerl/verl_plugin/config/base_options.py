"""verl's configuration classes of the actor's engine with our options, which `apply.py` fills in on the driver."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl.workers.config import FSDPEngineConfig

from verl_qerl import verl_plugin
from verl_qerl.formats import FORMATS, WeightFormat, get_format
from verl_qerl.options.schema import Base
from verl_qerl.verl_plugin.config.nodes import plain

# Keys under which the actor's digests, what is where in a flat adapter, and the adapter's checksum travel with its
# configuration.
DIGESTS = "verl_qerl_base_digests"
LAYOUT = "verl_qerl_adapter_layout"
CHECKSUM = "verl_qerl_adapter_checksum"


@dataclass(frozen=True)
class BaseOptions(Base):
    """`+qerl.base.*` as the actor's process gets them.

    Attributes:
        has_adapter: An adapter is trained on a frozen base; else all weights are, and each sync quantizes them.
        run: Values of other nodes that the plan of the memory needs, by name; see memory_check.py.
    """

    NODE: ClassVar[str] = "actor.fsdp_config.qerl"

    format: str = "nvfp4"
    has_adapter: bool = True
    run: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is None:
            object.__setattr__(self, "scale", FORMATS[self.format].scale_choices[0])

    @property
    def weight_format(self) -> WeightFormat:
        """The format, with its options."""
        return get_format(self.format, self.scale)


@dataclass
class QerlFSDPEngineConfig(FSDPEngineConfig):
    """FSDPEngineConfig of a run with `+rollout=...` or UAQ.

    Attributes:
        qerl: How the engine holds its base, or quantizes what it sends; None for a rollout in bf16.
        uaq_scale: s by which the engine scales what it loads; None leaves the weights as model.path has them.
    """

    qerl: Any = None
    uaq_scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if verl_plugin.FAILURE is not None:
            raise RuntimeError(f"verl_qerl cannot be used: {verl_plugin.FAILURE}")
        if self.qerl is not None and not isinstance(self.qerl, BaseOptions):
            object.__setattr__(self, "qerl", BaseOptions.from_mapping(plain(self.qerl)))
