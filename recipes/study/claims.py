"""What the two papers claim, what readers and we ask, and what is compared here to see whether it holds."""

from typing import NamedTuple

LORA = "bf16_merge"  # the fastest 16-bit LoRA of stock verl
EARLIER = ("rounded",)  # tags of runs of earlier packages
MARGIN = 0.02  # of reward or accuracy: what is not lower by more counts as good


class Claim(NamedTuple):
    """A sentence, and the comparison that tests it.

    Attributes:
        of: Who says so.
        text: What is said.
        arm: Whose runs are compared, with a tag behind `.` where they have one,
        other: with whose of the same seed,
        measure: in what (report.MEASURES),
        kind: `more` than the other, or as `good`.
    """

    of: str
    text: str
    arm: str
    other: str
    measure: str
    kind: str


QERL, QURL, OWN, US = "QeRL", "QuRL", "readers of QeRL", "this package"
CLAIMS = [
    Claim(QERL, "quantization raises the policy's entropy", "nvfp4", LORA, "entropy", "more"),
    Claim(QERL, "reward grows faster than with 16-bit LoRA", "nvfp4_aqn", LORA, "area", "more"),
    Claim(QERL, "and ends higher", "nvfp4_aqn", LORA, "pass1", "more"),
    Claim(QERL, "it ends where full fine-tuning ends", "nvfp4_aqn", "bf16_full", "pass1", "good"),
    Claim(QERL, "noise adds to what quantization does: faster", "nvfp4_aqn", "nvfp4", "area", "more"),
    Claim(QERL, "and higher", "nvfp4_aqn", "nvfp4", "pass1", "more"),
    Claim(QURL, "8-bit rollouts lose nothing: INT8 with ACR", "int8_acr", "bf16_full", "pass1", "good"),
    Claim(QURL, "the same: FP8 with ACR", "fp8_acr", "bf16_full", "pass1", "good"),
    Claim(QURL, "ACR is better than none: INT8", "int8_acr", "int8", "area", "more"),
    Claim(QURL, "the same: FP8", "fp8_acr", "fp8", "area", "more"),
    Claim(OWN, "is it the noise alone? bf16 with noise learns faster", "bf16_noise", LORA, "area", "more"),
    Claim(OWN, "and ends higher", "bf16_noise", LORA, "pass1", "more"),
    Claim(OWN, "noise of a chosen size is better than none on NVFP4: faster", "nvfp4_noise", "nvfp4", "area", "more"),
    Claim(OWN, "and higher", "nvfp4_noise", "nvfp4", "pass1", "more"),
    Claim(OWN, "noise is better than a temperature of the same entropy", "bf16_noise", "bf16_hot", "pass1", "more"),
    Claim(OWN, "NVFP4 alone learns as fast as 16-bit LoRA", "nvfp4", LORA, "area", "good"),
    Claim(OWN, "and ends as high", "nvfp4", LORA, "pass1", "good"),
    # The same package on another format: what is not lower there is not lost by what both share.
    Claim(OWN, "LoRA on INT8 ends as high as 16-bit LoRA", "int8_lora", LORA, "pass1", "good"),
    Claim(OWN, "and NVFP4 as high as INT8", "nvfp4", "int8_lora", "pass1", "good"),
    # On its own answers the untrained model is as near to bf16 with FP8 as with INT8, five times as near as with NVFP4.
    Claim(OWN, "LoRA on FP8 ends as high as 16-bit LoRA", "fp8_lora", LORA, "pass1", "good"),
    Claim(OWN, "and higher than on NVFP4", "fp8_lora", "nvfp4", "pass1", "more"),
    # The same weights in stock verl: what is lower there is lost by rounding them, not by what computes with them.
    Claim(OWN, "stock LoRA on the weights of NVFP4, in bf16, learns as fast", "bf16_of_nvfp4", LORA, "late", "good"),
    Claim(OWN, "and ends as high", "bf16_of_nvfp4", LORA, "pass1", "good"),
    Claim(OWN, "NVFP4 learns as fast as that", "nvfp4", "bf16_of_nvfp4", "late", "good"),
    Claim(OWN, "and ends as high", "nvfp4", "bf16_of_nvfp4", "pass1", "good"),
    Claim(OWN, "NVFP4 on a calibrated base learns as fast", "nvfp4_gptq", LORA, "area", "good"),
    Claim(OWN, "and ends as high", "nvfp4_gptq", LORA, "pass1", "good"),
    Claim(OWN, "calibration helps: faster", "nvfp4_gptq", "nvfp4", "area", "more"),
    Claim(OWN, "and higher", "nvfp4_gptq", "nvfp4", "pass1", "more"),
    Claim(US, "to add the adapter before rounding makes learning faster", "nvfp4", "nvfp4.rounded", "area", "more"),
    Claim(US, "and ends higher", "nvfp4", "nvfp4.rounded", "pass1", "more"),
]
MEASURED = "see tests/bench/results"
NOT_BY_THESE_RUNS = [
    (
        QERL,
        "rollouts more than 1.5 times as fast",
        f"the rollout of a step 1.37 times with this model, 1.45 with 7B: {MEASURED}",
    ),
    (QERL, "32B trains on one GPU of 80 GB", "two steps with random weights fit: see recipes/qwen32b_80gb"),
    (QURL, "ACR keeps long training from collapsing", "60 steps are not long, and its wider bound was hardly ever met"),
    (
        QURL,
        "rollouts 20 to 80 % faster",
        f"int8 1.44 times with this model; 7B: int8 6 % slower on a busy host, fp8 13 % faster, {MEASURED}",
    ),
]
