"""Writes the model of the study, Qwen2.5-Coder-1.5B-Instruct in bf16, dequantized from the official Q4_K_M file.

    pip install gguf==0.19.0
    python3 recipes/study/make_model.py --out ~/models/qwen    # --gguf FILE takes a local one

It gives the tensors that all runs have had, to the bit. The file has a head in six bits and an embedding in four, where
the model has one tensor for both: the head is taken.
"""

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

from verl_qerl.checkpoints.model_config import hub_errors
from verl_qerl.cli import run_guarded
from verl_qerl.cli.output_dir import check_absent, new_directory

REPOSITORY, FILE = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
STOP, PAD = "<|im_end|>", "<|endoftext|>"  # the file names the end of the base model
# As Qwen publishes it. vLLM ends an answer at both.
GENERATION: dict[str, Any] = {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "eos_token_id": [151645, 151643],
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.1,
}


def checked(file: Path | None) -> Path:
    """The file, by default from the hub.

    Raises:
        ValueError: It is another one, or the hub cannot be reached.
        OSError: It is not there.
    """
    if file is None:
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(REPOSITORY, FILE))
        except hub_errors() as error:
            raise ValueError(
                f"{FILE} of {REPOSITORY} cannot be reached on the hub ({type(error).__name__}). A local copy is"
                " accepted too: give it with --gguf."
            ) from error
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"another file: {file} has the sha256 {found}. {SHA256} is accepted: {FILE} of {REPOSITORY}.")
    return file


def write(file: Path, out: Path) -> int:
    """Write the model, with its tokenizer; 0."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    tokenizer.eos_token, tokenizer.pad_token = STOP, PAD
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    model.set_input_embeddings(model.get_output_embeddings())
    model.config.tie_word_embeddings = True
    model.generation_config = GenerationConfig(**GENERATION)
    with new_directory(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the Q4_K_M file; from the hub without it")
    args = parser.parse_args(arguments)

    def run() -> int:
        check_absent(args.out)
        return write(checked(args.gguf), args.out)

    return run_guarded(parser, run)


if __name__ == "__main__":
    sys.exit(main())
