from pathlib import Path

import pytest

pytest.importorskip("verl")


def test_verls_own_engine_and_a_critic_with_the_attention_that_is_asked_for(fresh_process, models):
    """verl registers neither for a CPU, and its critic loads with flash-attn whatever override_config says."""
    fresh_process(str(Path(__file__).with_name("engines_cases.py")), str(models / "bf16"))
