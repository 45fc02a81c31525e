import pytest


@pytest.fixture
def tiny_model():
    """Builds a two-layer Qwen2 in bf16, from a seed; its four linears of attention and three of the MLP per layer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def build(seed: int = 0):
        torch.manual_seed(seed)
        config = transformers.Qwen2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        )
        return transformers.Qwen2ForCausalLM(config).bfloat16().eval()

    return build
