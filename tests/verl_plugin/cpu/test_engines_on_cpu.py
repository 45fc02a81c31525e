from pathlib import Path

import pytest

pytest.importorskip("verl")


def test_a_critic_with_the_attention_that_is_asked_for(fresh_process, models):
    """verl's loads with flash-attn whatever override_config says, and has none registered for a CPU."""
    fresh_process(str(Path(__file__).with_name("engines_cases.py")), str(models / "bf16"))
