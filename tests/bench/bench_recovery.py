"""What each weight format keeps of a pretrained model: errors of weights and outputs, log-probs and perplexity.

    python tests/bench/bench_recovery.py --model DIR --train gsm8k/train.jsonl --data gsm8k/test.jsonl \
        --out tests/bench/results/<gpu>/recovery.json

Texts are questions with their answers, without a chat; with --sampled, what the model answers to them in its chat
(temperature 1), of which the answers are scored. `gptq` is calibrated on those of --train, all is measured on those of
--data, by transformers in bf16 with dequantized weights. int8 and fp8 round the inputs of their linears too, a scale a
token, as their rollouts do; `int8 weights` does not, like the actor of a run with LoRA on INT8. Errors of outputs are
||X W'^T - X W^T|| / ||X W^T|| over the inputs X of a linear in the bf16 model, of the first texts. Differences and KL
are those of a token's log-probs beside bf16's; every `_error` is a standard error over texts, whose tokens resemble
each other. A row is added to the file's rows of this model after each method. On a GPU if there is one.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import result_file
import torch
from bench_scales import load, log_probs, nll, rounded
from readme_tables import recovery

from verl_qerl.checkpoints.source import Source, open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli.data.schema import MATH_INSTRUCTION
from verl_qerl.cli.quantize.calibration import calibrated_stream
from verl_qerl.formats import WeightFormat, get_format
from verl_qerl.formats.reference import dequantize, relative_error

# Method -> format and scale choice; None is that of the format.
METHODS = {
    "nvfp4 gptq": ("nvfp4", None),
    "nvfp4 mse": ("nvfp4", None),
    "nvfp4 minmax": ("nvfp4", "minmax"),
    "mxfp4": ("mxfp4", None),
    "int8 weights": ("int8", None),
    "int8": ("int8", None),
    "fp8": ("fp8", None),
}
Inputs = dict[str, torch.Tensor]  # of linears, [tokens, K] in the dtype of the model


class Text(NamedTuple):
    """Token ids, and how many of them are not scored."""

    ids: list[int]
    given: int = 1


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="bf16 model directory with a tokenizer")
    parser.add_argument("--describe", default="", help="what the model is, for the result file")
    parser.add_argument("--train", type=Path, required=True, help="JSON lines of question and answer, to calibrate on")
    parser.add_argument("--data", type=Path, required=True, help="the same, to measure on")
    parser.add_argument("--train-texts", type=int, default=128)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--sampled", type=int, help="score sampled answers of at most so many tokens")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of what transformers computes"
    )
    parser.add_argument("--input-tokens", type=int, default=512, help="to measure errors of outputs on")
    parser.add_argument("--layers", type=int, help="quantize only so many, from the first (default: all)")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    model, ids = load(str(args.model), args.data, args.texts)
    model.to(getattr(torch, args.dtype))
    texts = sampled(model, args) if args.sampled else [Text(one) for one in ids]
    _, train = load(str(args.model), args.train, args.train_texts)
    options = {name: value for name, value in vars(args).items() if name not in ("model", "train", "data", "out")}
    run = {"model": args.describe or args.model.name} | result_file.header(options)
    run["versions"] |= {name: version(name) for name in ("transformers", "compressed-tensors")}
    run |= {"shapes": shapes(args.model), "tokens": sum(len(text.ids) - text.given for text in texts)}
    run |= {"calibration_tokens": sum(map(len, train)), "rows": []}
    found = json.loads(args.out.read_text()) if args.out.exists() else {"op": "recovery", "runs": []}
    found["runs"] = [one for one in found["runs"] if one["model"] != run["model"]] + [run]
    for row in Recovery(model, args.model, texts, train, args).rows():
        run["rows"].append(row)
        result_file.write(args.out, found)
        print({name: value for name, value in row.items() if name != "linears"}, flush=True)
    print(recovery([{"runs": [run]}]))


class Recovery:
    """A model in bf16, and what is measured of it in other formats."""

    def __init__(
        self, model: Any, folder: Path, texts: list[Text], train: list[list[int]], args: argparse.Namespace
    ) -> None:
        self.model, self.texts, self.train, self.methods = model, texts, train, args.methods
        self.source: Source = open_source(folder)
        layers = model.config.num_hidden_layers
        left = range(args.layers or layers, layers)
        self.ignore = ["lm_head", *(rf"re:model\.layers\.{i}\." for i in left)]
        self.device = "cuda" if next(model.parameters()).is_cuda else "cpu"
        self.few: list[list[int]] = []
        for text in texts:
            if sum(map(len, self.few)) < args.input_tokens:
                self.few.append(text.ids)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One of bf16 and one of each method, as they are measured."""
        # Numbers of 16 bits, but log-probs of the tokens themselves in full.
        plain = [self.scored(text) for text in self.texts]
        losses = [nll(one, text.ids[text.given - 1 :]) for one, text in zip(plain, self.texts, strict=True)]
        reference = [one.bfloat16() for one in plain]
        del plain
        yield {"method": "bf16", "bits": 16.0} | of_losses(losses)
        inputs = self.inputs()
        for method in self.methods:
            form = get_format(*METHODS[method])
            began, used = time.perf_counter(), time.process_time()
            linears, originals = self.quantize(method, form, inputs)
            seconds, used = time.perf_counter() - began, time.process_time() - used
            with ExitStack() as hooks:
                if rounds_inputs(method, form):
                    for name in originals:
                        hook = self.model.get_submodule(name).register_forward_pre_hook(rounding(form))
                        hooks.callback(hook.remove)
                row = {"method": method} | self.compare(reference, losses)
            for name, weight in originals.items():
                self.model.get_submodule(name).weight.data = weight
            for kind in ("bits", "weight_error", "output_error"):
                row[kind] = statistics.fmean(one[kind] for one in linears.values())
            row |= {"seconds": seconds, "processor_seconds": used}
            shown = {name: rounded(value) for name, value in row.items()}
            yield shown | {"linears": {name: {k: rounded(v) for k, v in one.items()} for name, one in linears.items()}}

    def scored(self, text: Text) -> torch.Tensor:
        """[tokens that are scored, V] float32."""
        return log_probs(self.model, text.ids)[text.given - 1 :]

    def inputs(self) -> Inputs:
        """Of every linear that is quantized, in the bf16 model."""
        seen: dict[str, list[torch.Tensor]] = {}
        with ExitStack() as hooks:
            for name, linear in self.model.named_modules():
                if isinstance(linear, torch.nn.Linear) and ".layers." in name:
                    keep: list[torch.Tensor] = seen.setdefault(name, [])
                    hook = linear.register_forward_pre_hook(lambda _, given, keep=keep: keep.append(given[0][0]))
                    hooks.callback(hook.remove)
            for text in self.few:
                log_probs(self.model, text)
        return {name: torch.cat(parts) for name, parts in seen.items()}

    def quantize(self, method: str, form: WeightFormat, inputs: Inputs) -> tuple[dict[str, Any], Inputs]:
        """Give the model quantized weights; errors of each linear, and the weights that it had."""
        linears, originals = {}, {}

        def observe(module: str, weight: torch.Tensor, packed: Any, **_: float) -> None:
            x, dense = inputs[module], dequantize(packed)
            answers = x.float() @ weight.float().t()
            mine = (rounding(form)(None, (x,))[0] if rounds_inputs(method, form) else x).float() @ dense.float().t()
            linears[module] = {
                "bits": 8 * packed.size_bytes / weight.numel(),
                "weight_error": relative_error(weight, packed),
                "output_error": float((mine - answers).norm() / answers.norm()),
            }
            linear = self.model.get_submodule(module)
            originals[module], linear.weight.data = linear.weight.data, dense.to(linear.weight.dtype)

        more = {"texts": self.train} if method == "nvfp4 gptq" else {}
        pack: Callable[..., Any] = calibrated_stream if more else packed_stream
        for _ in pack(self.source, form, self.ignore, self.device, observe, **more):
            pass
        return linears, originals

    def compare(self, reference: list[torch.Tensor], losses: list[torch.Tensor]) -> dict[str, Any]:
        """The model as it is now beside bf16's log-probs [tokens, V] and losses [tokens] of each text."""
        mine, kls = [], []
        for text, expected in zip(self.texts, reference, strict=True):
            found, expected = self.scored(text), expected.float()
            kls.append((expected.exp() * (expected - found)).sum(-1))
            mine.append(nll(found, text.ids[text.given - 1 :]))
        changes = [one - other for one, other in zip(mine, losses, strict=True)]
        row = of_losses(mine)
        for name, values in (
            ("change", changes),
            ("mean_abs_difference", [one.abs() for one in changes]),
            ("kl", kls),
        ):
            row[name], row[f"{name}_error"] = token_mean(values)
        return row


def sampled(model: Any, args: argparse.Namespace) -> list[Text]:
    """The model's answers to the questions of --data."""
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in args.data.read_text().splitlines()[: args.texts]]
    chats = [[{"role": "user", "content": f"{row['question']} {MATH_INSTRUCTION}"}] for row in rows]
    tokenizer.padding_side = "left"
    asked = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    with torch.no_grad():
        found = model.generate(**asked, max_new_tokens=args.sampled, **options)
    texts = []
    for ids, mask, answer in zip(asked["input_ids"], asked["attention_mask"], found, strict=True):
        given, new = ids[mask.bool()].tolist(), answer[len(ids) :].tolist()
        end = new.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in new else len(new)
        texts.append(Text(given + new[:end], len(given)))
    return texts


def rounds_inputs(method: str, form: WeightFormat) -> bool:
    """Whether the inputs of linears are rounded too."""
    return form.quantizes_activations and not method.endswith("weights")


def shapes(folder: Path) -> dict[str, int]:
    """The sizes in config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ends = ("_size", "_layers", "_heads", "head_dim")
    return {name: value for name, value in config.items() if name.endswith(ends) and isinstance(value, int)}


def of_losses(losses: list[torch.Tensor]) -> dict[str, Any]:
    """Perplexity with its 95 % interval."""
    mean, error = token_mean(losses)
    interval = [rounded(math.exp(mean + side * 1.96 * error)) for side in (-1, 1)]
    return {"perplexity": rounded(math.exp(mean)), "perplexity_interval": interval}


def token_mean(texts: list[torch.Tensor]) -> tuple[float, float]:
    """Mean over the tokens of all texts, and its standard error as the ratio of two sums over texts."""
    counts = torch.tensor([float(len(text)) for text in texts], dtype=torch.float64)
    sums = torch.stack([text.double().sum().cpu() for text in texts])
    mean = sums.sum() / counts.sum()
    spread = (sums - mean * counts).square().sum() * len(texts) / (len(texts) - 1)
    return float(mean), float(spread.sqrt() / counts.sum())


def rounding(form: Any) -> Callable[..., Any]:
    """A hook that rounds the inputs of a linear as the kernels of `form` do."""

    def hook(_: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        codes, scale = form.quantize_rows(given[0].reshape(-1, given[0].shape[-1]).bfloat16())
        return ((codes.float() * scale).to(given[0].dtype).view(given[0].shape), *given[1:])

    return hook


if __name__ == "__main__":
    main()
