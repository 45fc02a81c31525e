"""What `export` can write, and of what."""

from verl_qerl.checkpoints.experts import is_expert
from verl_qerl.cli.export.adapter import Adapter
from verl_qerl.cli.export.arguments import FORMS, LAYOUTS, WITH_BASE
from verl_qerl.cli.export.fsdp_checkpoint import Checkpoint
from verl_qerl.cli.export.merge import Base


def check_base(form: str, base: Base, has_prompts: bool) -> None:
    """Refuse a form that the base has not.

    Args:
        form: One of FORMS.
        base: Of the checkpoint.
        has_prompts: Log-probs are to be compared.

    Raises:
        ValueError: The base goes into no such form.
    """
    if form in (WITH_BASE, *LAYOUTS) and base.format != "nvfp4":
        raise ValueError(
            f"a model on a base in another format is not written packed here: to={form}, base={base.name} in"
            f" {base.format}. Accepted are peft and merged-bf16. Use --to merged-bf16, then `python -m verl_qerl"
            f" quantize --format {base.format}`."
        )
    if form == WITH_BASE and not base.is_packed:
        raise ValueError(
            f"the base was not packed while the adapter was trained: to={form}, base={base.name}. Accepted are peft"
            " and the merged forms. Use --to peft."
        )
    if has_prompts and any(map(is_expert, base.linears)):
        raise ValueError(
            f"log-probs of a mixture of experts cannot be compared here: base={base.name}. --prompts is accepted with"
            " models without experts. Leave it out."
        )


def check_trained(form: str, checkpoint: Checkpoint, adapter: Adapter) -> None:
    """Refuse a form that cannot hold what was trained.

    Args:
        form: One of FORMS.
        checkpoint: What was trained.
        adapter: Of it.

    Raises:
        ValueError: It cannot.
    """
    if form in ("peft", WITH_BASE) and not adapter.factors:
        raise ValueError(
            f"the checkpoint holds no adapter: {checkpoint.folder} is of a run of all weights. Accepted with it are"
            " merged-bf16, merged-nvfp4 and modelopt. Use --to merged-bf16."
        )
    if form == "peft" and checkpoint.norms:
        raise ValueError(
            f"an adapter cannot hold trained norms, which vLLM would not load: {len(checkpoint.norms)} norms in"
            f" {checkpoint.folder}. Accepted with them are {', '.join(FORMS[1:])}. Use --to {WITH_BASE}."
        )
