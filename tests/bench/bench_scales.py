"""What NVFP4's ways to choose block scales do to a pretrained model: weight error, log-probs, and time to quantize.

    python tests/bench/bench_scales.py --model DIR --data gsm8k/test.jsonl --out tests/bench/results/<gpu>/scales.json

Beside the choices of `quantize` two of others, by what they minimize: `four_over_six` (arXiv 2512.02010; amax lands on
6 or on 4, whichever has the smaller squared error) and `expanded_mse` (llm-compressor's nvfp4_expanded_mse: the least
sum of |error| ** 2.4 with scales from 0.8 to 1.8 times amax / 6, here over all scales of E4M3 there). A row is added to
the file's rows of this model after each choice.

Texts are questions of GSM8K with their solutions, without a chat. KL is that of bf16 to the quantized model, a token of
these texts, by transformers in bf16 with dequantized weights, over the whole vocabulary; its standard error is that of
means over texts. `kl_change` is against the first choice, text by text. On a GPU if there is one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_time
import result_file
import torch
from qerl_testing import quantize, rms_error_ratio

from verl_qerl.formats import PackedWeight, nvfp4
from verl_qerl.formats.base import in_chunks
from verl_qerl.formats.e2m1 import E2M1_VALUES, e2m1_codes, pack_codes
from verl_qerl.formats.nvfp4 import SCALE_CHOICES
from verl_qerl.formats.reference import dequantize

Quantizer = Callable[[torch.Tensor], PackedWeight]
_STEPS = range(-3, 8)  # of E4M3, around the scale nearest to amax / 6: 0.8 to 1.8 times that lies within


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="bf16 model directory with a tokenizer")
    parser.add_argument("--describe", default="", help="what the model is, for the result file")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    model, texts = load(args.model, args.data, args.texts)
    options = {name: value for name, value in vars(args).items() if name not in ("model", "data", "out")}
    run = {"model": args.describe or Path(args.model).name} | result_file.header(options)
    run |= {"tokens": sum(len(text) - 1 for text in texts), "rows": []}
    found = json.loads(args.out.read_text()) if args.out.exists() else {"op": "scales", "runs": []}
    found["runs"] = [one for one in found["runs"] if one["model"] != run["model"]] + [run]
    for row in measure(model, texts, args.choices):
        run["rows"].append(row)
        result_file.write(args.out, found)
        print({name: value for name, value in row.items() if name != "kl_of_texts"}, flush=True)
    print("\n".join(table(run)))


def load(folder: str, data: Path, count: int) -> tuple[torch.nn.Module, list[list[int]]]:
    """The model in bf16, and the token ids of the texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in data.read_text().splitlines()[:count]]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = tokenizer([f"{row['question']}\n{row['answer']}" for row in rows]).input_ids
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), texts


def measure(model: torch.nn.Module, texts: list[list[int]], choices: list[str]) -> Any:
    """A row for bf16 and one for each choice, as they are measured."""
    linears = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    linears = {name: one for name, one in linears.items() if name != "lm_head"}
    originals = {name: linear.weight.data for name, linear in linears.items()}
    reference = [log_probs(model, text).bfloat16() for text in texts]
    yield {"choice": "bf16", "nll": token_mean([nll(one, text) for one, text in zip(reference, texts, strict=True)])}
    first: list[float] = []
    for choice in choices:
        CHOICES[choice](next(iter(originals.values())))  # what is compiled or loaded at the first call
        host_time.synchronize()
        errors, began, computed = [], time.perf_counter(), time.process_time()
        packed = {name: CHOICES[choice](weight) for name, weight in originals.items()}
        host_time.synchronize()
        seconds, computed = time.perf_counter() - began, time.process_time() - computed
        for name, linear in linears.items():
            linear.weight.data = dequantize(packed.pop(name))  # bf16 holds it exactly
            errors.append(rms_error_ratio(linear.weight.data.float(), originals[name].float()))
        kls, nlls = [], []
        for text, wanted in zip(texts, reference, strict=True):
            mine, wanted = log_probs(model, text), wanted.float()
            kls.append((wanted.exp() * (wanted - mine)).sum(-1))
            nlls.append(nll(mine, text))
        means = [float(kl.mean()) for kl in kls]
        first = first or means
        weights = sum(weight.numel() for weight in originals.values())
        row = {"choice": choice, "relative_error": statistics.fmean(errors), "kl": token_mean(kls)}
        row |= {"kl_standard_error": error_of_mean(means), "nll": token_mean(nlls)}
        changes = [one - other for one, other in zip(means, first, strict=True)]
        row |= {"kl_change": statistics.fmean(changes), "kl_change_standard_error": error_of_mean(changes)}
        row |= {"seconds": seconds, "processor_seconds": computed, "weights": weights, "linears": len(linears)}
        yield {name: rounded(value) for name, value in row.items()} | {"kl_of_texts": [rounded(one) for one in means]}


def log_probs(model: torch.nn.Module, text: list[int]) -> torch.Tensor:
    """[tokens - 1, V] float32."""
    with torch.no_grad():
        ids = torch.tensor([text], device=next(model.parameters()).device)
        return model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)


def nll(log_probs: torch.Tensor, text: list[int]) -> torch.Tensor:
    """[tokens - 1] float32."""
    return -log_probs.gather(1, torch.tensor(text[1:], device=log_probs.device)[:, None])[:, 0].float()


def token_mean(values: list[torch.Tensor]) -> float:
    return float(torch.cat(values).mean())


def error_of_mean(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5


def rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def four_over_six(weight: torch.Tensor) -> PackedWeight:
    """The better one of two scales a block: amax / 6 and amax / 4, rounded to E4M3."""
    return _search(weight, 2.0, lambda ideal: [_to_e4m3(ideal), _to_e4m3(ideal * 1.5)])


def expanded_mse(weight: torch.Tensor) -> PackedWeight:
    """The best one of all E4M3 scales of a range, by the power that llm-compressor takes of the error."""

    def scales(ideal: torch.Tensor) -> list[torch.Tensor]:
        middle = _to_e4m3(ideal).view(torch.uint8).short()
        return [(middle + step).clamp(0x08, 0x7E).to(torch.uint8).view(torch.float8_e4m3fn) for step in _STEPS]

    return _search(weight, 2.4, scales)


def _to_e4m3(scale: torch.Tensor) -> torch.Tensor:
    return scale.clamp(nvfp4.E4M3_MIN_NORMAL, nvfp4.E4M3_MAX).to(torch.float8_e4m3fn)


def _search(weight: torch.Tensor, power: float, scales: Callable[[torch.Tensor], list[torch.Tensor]]) -> PackedWeight:
    """[N, K] quantized, each block with the one of its scales that has the least sum of |error| ** power."""
    encode = nvfp4._power_of_two_below(256.0 * 6.0 / float(weight.abs().amax()))
    codes, scale = in_chunks(weight, lambda rows: _search_rows(rows, encode, power, scales))
    return nvfp4.nvfp4_weight(codes, scale, weight.new_tensor(1.0 / encode).float())


def _search_rows(
    rows: torch.Tensor, encode: float, power: float, scales: Callable[[torch.Tensor], list[torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = rows.float().view(len(rows), -1, nvfp4.BLOCK_SIZE) * encode
    tried = scales(blocks.abs().amax(-1) / 6.0)
    errors = []
    for scale in tried:
        scaled = blocks / scale.float()[..., None]
        difference = (_values(e2m1_codes(scaled)) - scaled).abs() * scale.float()[..., None]
        errors.append(difference.pow(power).sum(-1))
    best = torch.stack(errors).argmin(0)
    chosen = torch.stack([scale.view(torch.uint8) for scale in tried]).gather(0, best[None])[0]
    chosen = chosen.view(torch.float8_e4m3fn)
    codes = e2m1_codes(blocks / chosen.float()[..., None])
    return pack_codes(codes.view(rows.shape)), chosen


def _values(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(E2M1_VALUES, device=codes.device)[codes.int()]


def _choice(scale: str) -> Quantizer:
    return lambda weight: quantize(weight, scale)


CHOICES: dict[str, Quantizer] = {scale: _choice(scale) for scale in SCALE_CHOICES}
CHOICES |= {"four_over_six": four_over_six, "expanded_mse": expanded_mse}


def table(run: dict[str, Any]) -> list[str]:
    """Lines of Markdown."""
    rate = "processor second" if run["gpu"].startswith("cpu") else "second"
    lines = [f"| scales | relative error | KL a token | less KL than the first | NLL | M weights per {rate} |"]
    lines.append("|---" * 6 + "|")
    for row in run["rows"]:
        cells = [row["choice"], *["-"] * 3, f"{row['nll']:.4f}", "-"]
        if "kl" in row:
            cells[1] = f"{row['relative_error']:.4f}"
            cells[2] = f"{row['kl']:.4f} +- {row['kl_standard_error']:.4f}"
            cells[3] = f"{-row['kl_change']:.4f} +- {row['kl_change_standard_error']:.4f}"
            cells[5] = f"{row['weights'] / row[rate.replace(' ', '_') + 's'] / 1e6:.1f}"
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
