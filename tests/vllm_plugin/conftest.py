"""Tiny models on disk, and engines over them that the tests of this folder share."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import qerl_testing
import torch

from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.formats import NVFP4
from verl_qerl.formats.reference import dequantize

VOCABULARY = 512


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """Longer than the 128 tokens of a block of the CPU's prefix cache."""
    return [(7 * i) % 500 for i in range(200)]


@pytest.fixture(scope="session")
def vllm():
    """The vllm module, its engines in this process and small."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    yield pytest.importorskip("vllm")
    patch.undo()


@pytest.fixture(autouse=True)
def default_dtype():
    """Put back what an engine that fails while it loads leaves behind in this process."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{i}": i for i in range(VOCABULARY - 2)} | {"<eos>": VOCABULARY - 2, "<pad>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def save_model(folder: Path, family: str) -> None:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "eos_token_id": VOCABULARY - 2}
    if family == "qwen3_moe":
        model = qerl_testing.random_qwen3_moe(num_hidden_layers=3, **sizes)
    else:
        family, _, tied = family.partition("-")
        sizes |= {"head_dim": 64, "bos_token_id": None, "tie_word_embeddings": bool(tied)}
        if family == "mistral":
            sizes["sliding_window"] = None  # the default is older, and vLLM's attention on CPUs with AMX has none
        model = qerl_testing.random_decoder(family, gain=3, **sizes)
    model.save_pretrained(folder)
    save_tokenizer(folder)


def save_adapter(folder: Path, base: Path, targets: str | list[str], rank: int, seed: int) -> Path:
    peft = pytest.importorskip("peft")
    import transformers

    model = transformers.Qwen2ForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=targets)
    model = peft.get_peft_model(model, config)
    qerl_testing.draw_adapter(model, seed)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """Family, `-tied` behind it for tied embeddings -> directory of a bf16 model with two layers.

    qwen3_moe has a dense layer and two of experts.
    """
    made = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_model(made[family], family)
        return made[family]

    return get


@pytest.fixture(scope="session")
def packed_dir(model_dir, tmp_path_factory):
    """The Qwen2 model as `quantize --scale minmax` writes it."""
    from verl_qerl.cli.quantize.command import quantize_checkpoint

    out = tmp_path_factory.mktemp("packed") / "qwen2"
    quantize_checkpoint(model_dir("qwen2"), out, scale="minmax", device="cpu")
    return out


@pytest.fixture(scope="session")
def start(vllm):
    """Starts an engine with our loader; `aqn` are options of the noise, None leaves all of ours out."""

    def start_engine(
        path: Path, aqn: dict | None = None, additional: dict | None = None, form: str = "nvfp4", **options
    ):
        extra = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": 256, "max_num_seqs": 4} | options
        if aqn is not None or additional:
            extra["additional_config"] = {"verl_qerl": {"aqn": aqn, **(additional or {})}}
        return vllm.LLM(
            model=str(path),
            dtype="bfloat16",
            enforce_eager=True,
            load_format=f"verl_qerl_{form}",
            quantization=f"verl_qerl_{form}",
            worker_extension_cls="verl_qerl.vllm_plugin.worker.RolloutWorkerExtension",
            **extra,
        )

    return start_engine


@pytest.fixture(scope="session")
def engine(start, model_dir):
    """The bf16 Qwen2, quantized by the loader, with noise and room for an adapter. Tests leave it without noise."""
    return start(
        model_dir("qwen2"),
        aqn={"enabled": True},
        model_loader_extra_config={"scale": "minmax"},
        enable_lora=True,
        max_lora_rank=8,
    )


@pytest.fixture(scope="session")
def packed_engine(start, packed_dir):
    """The NVFP4 directory, without noise."""
    return start(packed_dir)


@pytest.fixture(scope="session")
def prompt_log_probs(vllm, prompt):
    """Log-probs of prompt[1:], [199] float64, as an engine gives them. They never come from the prefix cache."""

    def ask(engine, **options) -> torch.Tensor:
        params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False, **options)
        pairs = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([found[token].logprob for token, found in pairs], dtype=torch.float64)

    return ask


@pytest.fixture(scope="session")
def generate(vllm, prompt):
    """(log-probs of four greedy tokens, how many tokens of the prompt came from the prefix cache)."""

    def ask(engine, **options) -> tuple[list[tuple[int, float]], int]:
        params = vllm.SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
        (output,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False, **options)
        steps = [next(iter(step.items())) for step in output.outputs[0].logprobs]
        return [(token, found.logprob) for token, found in steps], output.num_cached_tokens

    return ask


@pytest.fixture(scope="session")
def digests_in():
    """Gives the digests of the packed base of an engine."""
    from verl_qerl.vllm_plugin.weights.loader import base_digests

    return lambda engine: engine.collective_rpc(lambda worker: base_digests(worker.model_runner.get_model()))[0]


@pytest.fixture(scope="session")
def reference_model(model_dir):
    """Builds the Qwen2 in transformers, its linears holding what NVFP4 makes of them (scale None: as they are)."""
    import transformers

    def build(scale: str | None = "minmax", dtype: torch.dtype = torch.float32):
        model = transformers.Qwen2ForCausalLM.from_pretrained(model_dir("qwen2"), dtype=torch.bfloat16).eval()
        if scale is not None:
            for name, item in packed_stream(open_source(model_dir("qwen2")), NVFP4(scale=scale)):
                if not isinstance(item, torch.Tensor):
                    model.get_submodule(name).weight.data = dequantize(item)
        return model.to(dtype)

    return build


@pytest.fixture(scope="session")
def reference_log_probs(prompt):
    """The same numbers from a transformers model, of its logits in float64."""
    return lambda model: qerl_testing.log_probs(model, torch.tensor([prompt]))


@pytest.fixture(scope="session")
def write_adapter(tmp_path_factory, model_dir):
    """Writes an adapter of random values; returns its directory."""

    def write(name: str, targets: list[str], rank: int) -> Path:
        folder = tmp_path_factory.mktemp("adapters") / name
        return save_adapter(folder, model_dir("qwen2"), targets, rank, seed=len(name))

    return write


@pytest.fixture
def random_qwen2(tmp_path) -> Path:
    """A bf16 Qwen2 of shapes that Marlin takes, with random weights and no tokenizer."""
    sizes = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    model = qerl_testing.random_qwen2(num_attention_heads=8, num_key_value_heads=2, **sizes)
    model.save_pretrained(tmp_path / "bf16")
    return tmp_path / "bf16"


@pytest.fixture
def random_adapter(random_qwen2, tmp_path) -> Callable[[int], Path]:
    """Writes an adapter of rank 16 of `random_qwen2`, drawn from a seed; returns its directory."""
    return lambda seed: save_adapter(tmp_path / f"adapter-{seed}", random_qwen2, "all-linear", 16, seed)


@pytest.fixture(scope="session")
def run_script(tmp_path_factory, warm_python) -> Callable[..., object]:
    """Run source code with arguments in a process of its own; what it prints after `RESULT `, decoded.

    It may import modules of this folder, and qerl_testing.
    """
    folders = [str(Path(file).parent) for file in (__file__, qerl_testing.__file__)]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])

    def run(source: str, *arguments: str, plugins: str | None = None) -> object:
        env = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
        env |= {"PYTHONPATH": path} if plugins is None else {"PYTHONPATH": path, "VLLM_PLUGINS": plugins}
        if not torch.cuda.is_available():
            env["TORCH_COMPILE_DISABLE"] = "1"  # vLLM's sampler, for up to eight seconds of a core
        script = tmp_path_factory.mktemp("script") / "script.py"
        script.write_text(source)
        done = warm_python(str(script), *arguments, env=env)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(lines[0].removeprefix("RESULT "))

    return run
