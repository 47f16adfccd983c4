"""Makes a folder of importable packages in which compare.py finds prime-rl or verl.

    python -m benchmarks.whole_systems.peers prime-rl FOLDER
    python -m benchmarks.whole_systems.peers verl FOLDER

FOLDER is for a machine with Python 3.12 on x86_64 Linux and Hopper GPUs that reaches no package
registry. It has vLLM, torch, transformers and what they and our own learner import, CuPy, pandas,
PyArrow, accelerate, PEFT, Hydra and tensorboard: none of these is brought. Each package is of one
version; where the registry has none of the commit that a peer asks for, it is a folder of a public
repository. CHANGES are what such a machine forces: texts of the packages that are replaced.

`flash-attn-4` in place of a peer makes what prime-rl's `--attention flash_attention_4` imports. It
goes into prime-rl's folder on the machine, where `--peer-path` then names the folder
nvidia_cutlass_dsl/dsl_packages in it too.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.measure import progress

# The versions of glibc's interface that wheels name; pip takes only those that it is told.
GLIBC = ("2014", "_2_5", "_2_12", "_2_17", "_2_24", "_2_26", "_2_27", "_2_28", "_2_31", "_2_34")


class Source(NamedTuple):
    """A package in a commit of a repository."""

    address: str
    commit: str
    package: str


class Change(NamedTuple):
    """One replacement in a file of FOLDER, whose text has `old` once."""

    file: str
    old: str
    new: str
    why: str


WHEELS = {
    "prime-rl": (
        "aiolimiter==1.2.1",
        "beartype==0.22.9",
        "connectrpc==0.11.1",
        "datasets==4.6.1",
        "fla-core==0.6.0",
        "flash-linear-attention==0.6.0",
        "latex2sympy2-extended==1.11.0",
        "math-verify==0.9.0",
        "modelexpress==0.3.0",
        "multiprocess==0.70.19",
        "orjson==3.13.0",
        "platformdirs==4.14.8",
        "prime-pydantic-config==0.4.3",
        "prime-sandboxes==0.2.39",
        "prime-tunnel==0.1.10",
        "prime==0.6.19",
        "protobuf-py-ext==0.1.1",
        "protobuf-py==0.1.1",
        "pyqwest==0.12.0",
        "renderers==0.1.12",
        "torchao==0.17.0",
        "torchdata==0.11.0",
        "typeguard==4.4.4",
        "tyro==1.0.17",
        "wandb-workspaces==0.4.13",
        "wandb==0.27.0",
    ),
    "flash-attn-4": (
        "flash-attn-4==4.0.0b36",
        "nvidia-cutlass-dsl-libs-base==4.8.1",
        "nvidia-cutlass-dsl-libs-cu13==4.8.1",
        "nvidia-cutlass-dsl==4.8.1",
        "quack-kernels==0.6.5",
        "torch-c-dlpack-ext==0.1.5",
    ),
    "verl": (
        "codetiming==1.4.0",
        "datasets==4.6.1",
        "multiprocess==0.70.19",
        "orjson==3.13.0",
        "pylatexenc==2.11",
        "pyvers==0.1.0",
        "ray==2.60.0",
        "tensordict==0.10.0",
        "torchdata==0.11.0",
        "transferqueue==0.1.11",
        "verl==0.9.1",
    ),
}
GITHUB = "https://github.com"
FLASH = Source(
    f"{GITHUB}/Dao-AILab/flash-attention", "060c9188beec3a8b62b33a3bfa6d5d2d44975fab", "flash_attn"
)
PRIME = f"{GITHUB}/PrimeIntellect-ai"
PRIME_RL = (f"{PRIME}/prime-rl", "559b44772e471d1538537b8805cc77f3824a5e64")
SOURCES = {
    "prime-rl": (
        Source(*PRIME_RL, "src/prime_rl"),
        Source(*PRIME_RL, "packages/prime-rl-configs/src/prime_rl"),
        Source(f"{PRIME}/verifiers", "a60a606ecc4d309247edf9ff92c3eabca362781f", "verifiers"),
        Source(
            f"{GITHUB}/pytorch/torchtitan", "23e4dfca5ca52587dbaf18f67bee8d73e875df5b", "torchtitan"
        ),
        Source(f"{GITHUB}/samsja/dion", "3c4bce5a60f3d1590761b881e253da5400355403", "dion"),
        FLASH,
    ),
    "verl": (FLASH,),
}
# What is large and not used there: other programs' binaries, web pages, other libraries of Ray.
NO_FLASH = ("flash_attn/cute", "flash_attn/flash_attn_triton_amd")
WITHOUT = {
    "prime-rl": ("wandb/bin", "torchtitan/experiments/flux", "test", *NO_FLASH),
    "flash-attn-4": ("nvidia_cutlass_dsl/cu13/lib/stubs",),
    "verl": (
        "ray/jars",
        "ray/dashboard/client",
        "ray/rllib",
        "ray/llm",
        "ray/core/libjemalloc.so",
        *NO_FLASH,
    ),
}
# Stands for a package that is imported and not called.
ABSENT = """from unittest.mock import MagicMock


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
"""
METADATA = "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n"
FLASH_FILES = {
    "flash_attn-2.8.3.dist-info/METADATA": METADATA,
    "flash_attn-2.8.3.dist-info/top_level.txt": "flash_attn\n",
    "flash_attn_2_cuda.py": Path(__file__).with_name("flash_kernels.py").read_text(),
}
TILELANG = {f"tilelang/{name}.py": ABSENT for name in ("__init__", "language")}
FILES: dict[str, dict[str, str]] = {
    "prime-rl": {"ring_flash_attn.py": ABSENT, **TILELANG, **FLASH_FILES},
    "verl": FLASH_FILES,
}
CHANGES: dict[str, tuple[Change, ...]] = {
    "prime-rl": (
        Change(
            "prime_rl/trainer/models/__init__.py",
            "_CUSTOM_CAUSAL_LM_MAPPING.register(config_cls, model_cls, exist_ok=True)",
            "_CUSTOM_CAUSAL_LM_MAPPING._extra_content[config_cls] = model_cls",
            "transformers 5.17 lets no class stand in for one of its own models, as Qwen3's",
        ),
        Change(
            "torchao/prototype/moe_training/kernels/mxfp8/cute_utils.py",
            "return len(_missing_cutedsl_runtime_packages()) == 0",
            "return False",
            "torchao's kernels for MXFP8, not used here, ask for an older CuTe DSL",
        ),
        Change(
            "prime_rl/utils/client.py",
            'NCCL broadcast initialization.")\n                return\n',
            'NCCL broadcast initialization.")\n                return\n            raise\n',
            "a server that failed to join the group was asked for weights all the same",
        ),
        Change(
            "prime_rl/utils/nccl.py",
            "    pynvml.nvmlInit()\n    try:",
            "    import benchmarks.common.older_nccl\n\n    pynvml.nvmlInit()\n    try:",
            "vLLM 0.32 sends nothing over torch 2.11's NCCL; trainer and engine both come by here",
        ),
        Change(
            "verifiers/v1/tasksets/nemo_gym/toolset.py",
            "from mcp.server.fastmcp import FastMCP",
            "from mcp.server.mcpserver import MCPServer as FastMCP",
            "vLLM 0.32 needs mcp 2, which has another name for it; nothing of this work calls it",
        ),
    ),
    "verl": (
        Change(
            "verl/workers/rollout/vllm_rollout/vllm_async_server.py",
            "wait_for_inflight_requests=False,",
            'mode="abort",',
            "vLLM 0.32 has another name for it than 0.24",
        ),
        Change(
            "verl/workers/rollout/vllm_rollout/utils.py",
            "                            model.load_weights(param_updates)",
            "                            tied = self.model_config.hf_config.tie_word_embeddings\n"
            "                            sent = (p for p in param_updates"
            " if p[0] != 'lm_head.weight')\n"
            "                            model.load_weights(sent if tied else param_updates)",
            "vLLM 0.32 refuses a tied head without the embedding, which comes in an earlier bucket",
        ),
        Change(
            "verl/utils/import_utils.py",
            'trl_spec = importlib.util.find_spec("trl")',
            "trl_spec = None",
            "TRL 1.16, which may be there too, has no class for value heads where verl looks",
        ),
    ),
}


def install(wheels: Sequence[str], folder: Path) -> None:
    """Installs wheels into `folder`, without what they depend on."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}"]
    pip += ["--no-compile", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    pip += [f"--platform=manylinux{each}_x86_64" for each in GLIBC]
    subprocess.run([*pip, *wheels], check=True)
    # Their commands name this machine's interpreter.
    shutil.rmtree(folder / "bin", ignore_errors=True)


def check_out(source: Source, folder: Path) -> None:
    """Copies a package of a commit into `folder`, beside what is there under its name."""
    with tempfile.TemporaryDirectory() as place:
        for words in (
            ("init", "--quiet"),
            ("remote", "add", "origin", source.address),
            ("fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", source.commit),
            ("checkout", "--quiet", "FETCH_HEAD", "--", source.package),
        ):
            subprocess.run(["git", "-C", place, "-c", "gc.auto=0", *words], check=True)
        found = Path(place, source.package)
        how = {"dirs_exist_ok": True, "ignore_dangling_symlinks": True}
        shutil.copytree(found, folder / found.name, **how)


def apply(changes: Sequence[Change], folder: Path) -> None:
    """Replaces the texts; ValueError if a file has one of them not once."""
    for change in changes:
        file = folder / change.file
        text = file.read_text()
        times = text.count(change.old)
        if times != 1:
            raise ValueError(f"{change.file} has {times} times, not once: {change.old}")
        file.write_text(text.replace(change.old, change.new))


def make(peer: str, folder: Path) -> None:
    """Fills the new `folder` with what `peer` imports."""
    folder.mkdir(parents=True)
    progress("wheels")
    install(WHEELS[peer], folder)
    for source in SOURCES.get(peer, ()):
        progress(f"{source.package} of {source.address}")
        check_out(source, folder)
    for name in WITHOUT[peer]:
        found = folder / name
        found.unlink() if found.is_file() else shutil.rmtree(found)
    for name, text in FILES.get(peer, {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    apply(CHANGES.get(peer, ()), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("peer", choices=tuple(WHEELS))
    parser.add_argument("folder", type=Path, help="a new one")
    arguments = parser.parse_args()
    make(arguments.peer, arguments.folder)
    sizes = [each.stat().st_size for each in arguments.folder.rglob("*") if each.is_file()]
    print(f"{arguments.folder}: {len(sizes)} files, {sum(sizes) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
