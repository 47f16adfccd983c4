"""All shipped configurations, checked against models made here or the sizes that were published."""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from slipstream.client.launch import fit, launcher, placement
from slipstream.client.launch.placement import Share
from slipstream.core.configuration.config_file import (
    check_sizes,
    dump_config,
    load_config,
)
from slipstream.core.machine.address import free_port
from slipstream.core.machine.gpus import Gpu
from support.fakes.tiny_models import make_model_folder, make_seeing_model
from support.ranks import settings_ranks
from support.ranks.rank_pool import RankPool
from support.rigs.run_processes import run_command

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32768}
PLAIN = {"rope_type": "default", "rope_theta": 1000000.0}
QWEN = {"head_dim": 128, "max_position_embeddings": 40960, "rope_parameters": PLAIN}
# Settings that the model's makers recommend for sequences of 128k tokens.
LONG = QWEN | {"max_position_embeddings": 131072, "rope_parameters": YARN}
LLAMA = {"max_position_embeddings": 131072, "rope_parameters": LLAMA3_ROPE}
MOE = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
MOE |= {"norm_topk_prob": True}
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
# Published sizes; all but the smallest have a head of their own.
MODELS = {
    "qwen3-8b": ("Qwen3", (151936, 4096, 12288, 36, 32, 8), QWEN),
    "qwen3-8b-128k": ("Qwen3", (151936, 4096, 12288, 36, 32, 8), LONG),
    "qwen3-30b-a3b": ("Qwen3Moe", (151936, 2048, 6144, 48, 32, 4), QWEN | MOE),
    "smollm2": (
        "Llama",
        (49152, 576, 1536, 30, 9, 3),
        {"max_position_embeddings": 8192},
    ),
    "llama-70b": ("Llama", (128256, 8192, 28672, 80, 64, 8), LLAMA),
    "llama-405b": ("Llama", (128256, 16384, 53248, 126, 128, 8), LLAMA),
}


def write_model(name: str, folder: Path) -> None:
    """config.json alone, as transformers writes it for the published sizes."""
    import transformers

    family, sizes, more = MODELS[name]
    values = {
        "architectures": [f"{family}ForCausalLM"],
        **dict(zip(SIZES, sizes, strict=True)),
    }
    values["tie_word_embeddings"] = name == "smollm2"
    folder.mkdir(parents=True)
    getattr(transformers, f"{family}Config")(**values | more).save_pretrained(folder)


# configuration, number of nodes, sizes, and the groups of pipeline stages
LAYOUTS = {
    "qwen3-8b": (
        1,
        "8 ranks: tp 2, pp 4, cp 1, dp 1",
        "pp: 2 x 4: [0 2 4 6] [1 3 5 7]",
    ),
    "qwen3-8b-128k": (
        1,
        "8 ranks: tp 2, pp 1, cp 4, dp 1",
        "cp: 2 x 4: [0 2 4 6] [1 3 5 7]",
    ),
    "qwen3-30b-a3b": (
        4,
        "32 ranks: tp 2, pp 1, cp 4, dp 4; experts: ep 8, etp 2, dp 2",
        "ep: 4 x 8: [0 2 4 .. 14] [1 3 5 .. 15] [16 18 20 .. 30] [17 19 21 .. 31]",
    ),
    "llama-70b": (
        4,
        "32 ranks: tp 8, pp 2, cp 1, dp 2",
        "tp: 4 x 8: [0-7] [8-15] [16-23] [24-31]",
    ),
    "llama-405b": (
        32,
        "256 ranks: tp 8, pp 16, cp 2, dp 1",
        "cp: 128 x 2: [0 8] [1 9] [2 10] [3 11] [4 12] [5 13] [6 14] ... [247 255]",
    ),
}


# Empty tables spare the seconds that a check by Megatron takes.
UNCHECKED = ("learner.ddp={}", "learner.transformer={}")


# Configurations of models that are made here, weights included.
SMALL = ("colours", "quickstart", "smallest", "two-adapters")
# Configurations of SmolLM2 or a model of one's own, each with the numbers of GPUs that it is for.
MIDDLE = {
    "cluster": (2, 8),
    "smollm2": (1, 2),
    "smollm2-one-gpu": (1,),
    "smollm2-two-gpus": (2,),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    for name in LAYOUTS:
        write_model(name, folder / "models" / name)
    write_model("smollm2", folder / "models" / "smollm2")
    shutil.copytree(folder / "models" / "smollm2", folder / "models" / "policy")
    make_model_folder(folder / "models" / "tiny")
    make_seeing_model(folder / "models" / "tiny-vision", "qwen2_5_vl")
    return folder


def test_every_shipped_configuration_has_its_dry_run_here() -> None:
    shipped = {path.stem for path in CONFIGS.glob("*.toml")}
    assert {*SMALL, *MIDDLE, *LAYOUTS} == shipped


@pytest.mark.parametrize("name", [*SMALL, *MIDDLE])
def test_a_shipped_configuration_passes_its_dry_run(name: str, folder: Path) -> None:
    address = f'controller.address="127.0.0.1:{free_port("127.0.0.1")}"'
    transport = "nccl" if name == "smollm2-two-gpus" else ""
    result = run_command(
        "run", CONFIGS / f"{name}.toml", address, "--dry-run", cwd=folder
    )
    model = {"smallest": "tiny-echo"}.get(name, name)
    assert tomllib.loads(result.stdout)["run"]["name"] == model
    if name in SMALL:
        assert (result.returncode, result.stderr) == (0, "")
        return
    assert result.returncode == 1
    lacking = result.stderr.strip().removeprefix(
        "slipstream: the settings are right, but nothing can start here: "
    )
    weights, tokenizer, *rest = lacking.split("; ")
    assert "must hold safetensors weights" in weights
    assert "must hold the tokenizer" in tokenizer
    assert [transport in other for other in rest] == [True] * bool(transport)


@pytest.mark.parametrize("name", [*SMALL, *MIDDLE])
def test_a_shipped_configuration_fits_the_gpus_that_it_is_for(
    name, folder, monkeypatch
):
    monkeypatch.chdir(folder)
    for module in (placement, fit):
        monkeypatch.setattr(module, "uses_gpus", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for number in MIDDLE.get(name, (1, 2, 8)):
        gpus = tuple(
            Gpu(n, f"GPU-{n}", "NVIDIA H200", 140 << 30) for n in range(number)
        )
        monkeypatch.setattr(placement, "list_gpus", lambda gpus=gpus: gpus)
        config = load_config(CONFIGS / f"{name}.toml")
        share = Share(range(config.learner.world_size), config.rollout_server.count)
        _, obstacles = launcher.describe_dry_run(config, share)
        assert obstacles == tuple(check_sizes(config))


@pytest.fixture(scope="module")
def answers(rank_pool: RankPool, folder: Path) -> Path:
    """What Megatron has against each configuration, in a file of its name."""
    jobs = [f"{name}.toml" for name in LAYOUTS]
    for name, job in zip(LAYOUTS, jobs, strict=True):
        model = f"model.path={json.dumps(str(folder / 'models' / name))}"
        (folder / job).write_text(dump_config(load_config(CONFIGS / job, [model])))
    rank_pool.run(Path(settings_ranks.__file__), jobs, world_size=1, folder=folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_takes_the_settings_of_a_large_model(name: str, answers: Path) -> None:
    assert json.loads((answers / f"{name}.toml.json").read_text()) == ""


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_large_model_is_checked_by_a_dry_run_before_its_weights_are_there(
    name: str, folder: Path
):
    num_nodes, sizes, groups = LAYOUTS[name]
    result = run_command(
        "learner",
        CONFIGS / f"{name}.toml",
        f"--node-rank={num_nodes - 1}",
        "--master=10.0.0.10:29500",
        # A different run may have the default port.
        f'controller.address="127.0.0.1:{free_port("127.0.0.1")}"',
        # The stages of the largest model are right only with its table: Megatron itself is asked.
        *(() if name == "llama-405b" else UNCHECKED),
        "--dry-run",
        cwd=folder,
    )
    assert result.returncode == 1
    assert "the settings are right, but nothing can start here: " in result.stderr
    settings = tomllib.loads(result.stdout)
    assert settings["run"]["name"] == name
    assert settings["algorithm"]["router_replay"] == (
        "rollout" if "a3b" in name else "off"
    )
    # A setting that the configuration leaves out was chosen for the model.
    algorithm = settings["algorithm"]
    weights = settings["weights"]
    assert (algorithm["group_size"], algorithm["learning_rate"]) == (8, 1e-6)
    assert algorithm["groups_per_step"] == (8 if "128k" in name else 64)
    assert settings["learner"]["micro_batch_tokens"] == {
        "qwen3-30b-a3b": 32768,
        "qwen3-8b-128k": 32768,
    }.get(name, 8192)
    assert settings["rollout_server"]["tensor_parallel_size"] == {
        "llama-405b": 8,
        "llama-70b": 4,
        "qwen3-8b": 1,
    }.get(name, 2)
    # The cache of an engine holds so many, by the model's heads and layers.
    assert settings["rollout_server"]["max_episodes"] == {
        "llama-405b": 64,
        "llama-70b": 206,
        "qwen3-30b-a3b": 98,
        "qwen3-8b": 177,
        "qwen3-8b-128k": 32,
    }.get(name)
    numbers = tuple(
        weights[key] for key in ("bucket_mib", "bucket_deadline_s", "join_deadline_s")
    )
    assert numbers == (512, 60.0, 120.0)
    assert (
        len([line for line in lines_of(name) if line and not line.startswith("#")]) < 15
    )
    lines = result.stdout.splitlines()
    assert f"# {sizes}" in lines
    assert f"# {groups}" in lines
    assert "# Only sizes were checked. Before a run can start:" in lines


def lines_of(name: str) -> list[str]:
    return (CONFIGS / f"{name}.toml").read_text().splitlines()


def test_nodes_are_told_apart_by_the_environment_as_well(folder, monkeypatch):
    def dry_run(*overrides: str) -> subprocess.CompletedProcess[str]:
        config = CONFIGS / "llama-70b.toml"
        return run_command(
            "learner", config, "--dry-run", *UNCHECKED, *overrides, cwd=folder
        )

    def master(result: subprocess.CompletedProcess[str]) -> str:
        assert result.returncode == 1, result.stderr
        parsed: str = tomllib.loads(result.stdout)["learner"]["master"]
        return parsed

    monkeypatch.setenv("NODE_RANK", "3")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.10")
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert master(dry_run()) == "10.0.0.10:29501"
    assert master(dry_run("--master=10.0.0.11:29502")) == "10.0.0.11:29502"
    assert master(dry_run('learner.master="10.0.0.12:29503"')) == "10.0.0.12:29503"
    monkeypatch.setenv("NODE_RANK", "4")
    assert dry_run().stderr == "slipstream: --node-rank must be 0 to 3, got 4\n"
    monkeypatch.delenv("MASTER_PORT")
    assert (
        dry_run().stderr
        == "slipstream: MASTER_ADDR is 10.0.0.10, but MASTER_PORT is not set\n"
    )
