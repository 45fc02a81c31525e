import pytest

from verl_qerl.algos.aqn import TARGETS
from verl_qerl.algos.noise_places import FAMILIES, check_places, reaches_router


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_families_whose_norms_are_where_the_paper_has_them(family):
    check_places(family, None)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "qwen3_next", "glm4", "unheard_of"])
def test_others_are_refused_unless_the_user_names_the_norms(family):
    with pytest.raises(ValueError, match="it is not known where") as caught:
        check_places(family, None)
    assert str(caught.value) == (
        f"it is not known where model_type={family} has the norms that attention and MLP read. Accepted are"
        f" {', '.join(FAMILIES)}. Name the norms by `+aqn.targets=[...]`, where they are those of Llama"
        " [input_layernorm,post_attention_layernorm], in Gemma 2 and 3 [input_layernorm,pre_feedforward_layernorm], or"
        " leave out `+aqn.enabled=true`."
    )
    for named in (TARGETS, ("input_layernorm", "pre_feedforward_layernorm")):
        check_places(family, named)


def test_a_router_reads_the_second_norm_of_a_mixture_of_experts():
    assert reaches_router("qwen3_moe", TARGETS)
    assert not reaches_router("qwen3_moe", ("input_layernorm",))
    assert not reaches_router("qwen3", TARGETS)
    assert not reaches_router("unheard_of", TARGETS)
