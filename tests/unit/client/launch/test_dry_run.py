import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slipstream.client.launch import fit, launcher, machine, placement
from slipstream.client.launch.launcher import describe_dry_run, run_all
from slipstream.client.launch.placement import Share
from slipstream.client.launch.scene import Scene, Verdict
from slipstream.core.configuration.batch_costs import CONTROLLER_FURTHER_BATCHES
from slipstream.core.configuration.config_file import dump_config, parse_config
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.machine.gpus import Gpu
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config
from support.fakes.published_models import DEEPSEEK_V3, QWEN3_235B
from support.fakes.small_configs import small_config

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
}


def test_a_dry_run_prints_the_ranks_of_every_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    table = {
        "run": {"name": "test", "steps": 10},
        "model": {"path": str(tmp_path)},
        "algorithm": {
            "group_size": 4,
            "groups_per_step": 8,
            "learning_rate": 1e-3,
            "advantage": "gae",
            "kl": {"coefficient": 0.1},
            "weight": "none",
        },
        "sampling": {"max_reply_tokens": 16, "max_episode_tokens": 64},
        "learner": {"world_size": 2, "parallel": {"tp": 2}},
        "critic": {"learning_rate": 1e-3, "parallel": {"pp": 2}},
    }
    text, _ = describe_dry_run(parse_config(table, source="test"), Share(range(2), 1))
    assert tomllib.loads(text)["critic"]["parallel"]["pp"] == 2
    notes = [line for line in text.splitlines() if line.startswith("#")]
    assert (
        notes[12]
        == "# If each of a step's 32 episodes has 64 tokens, the most there can be:"
    )
    sizes = [note.split(" ", 3)[:3] for note in notes[13:21]]
    assert sizes == [
        ["#", *words]
        for words in (
            ("a", "token"),
            ("a", "trainer"),
            ("trajectories", "that"),
            ("the", "journal"),
            ("weights", "are"),
            ("the", "controller"),
            ("a", "trainer"),
            ("the", "journal"),
        )
    ]
    assert [*notes[:12], *notes[22:26]] == [
        "# The trainer's ranks:",
        "# 2 ranks: tp 2, pp 1, cp 1, dp 1",
        "# tp: 1 x 2: [0 1]",
        "#",
        "# The reference in the same ranks:",
        "# 2 ranks: tp 2, pp 1, cp 1, dp 1",
        "# tp: 1 x 2: [0 1]",
        "#",
        "# The critic in the same ranks:",
        "# 2 ranks: tp 1, pp 2, cp 1, dp 1",
        "# pp: 1 x 2: [0 1]",
        "#",
        "# The GPUs of what starts here:",
        "# no GPU is used",
        "# weights travel by gloo",
        "# vLLM runs the model eagerly: rollout_server.enforce_eager is true by default on a CPU",
    ]
    assert notes[27].startswith(
        "# Warning: algorithm.max_staleness is 2 without a correction: "
    )


def test_a_dry_run_says_what_engines_lack_on_a_cpu(tmp_path, monkeypatch):
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(SIZES | experts))
    server = {"quantization": "fp8_per_channel"}
    config = small_config(model={"path": str(tmp_path)}, rollout_server=server)
    monkeypatch.setattr(fit, "uses_gpus", lambda: False)
    lack = "no kernel there that quantises experts"
    assert lack in describe_dry_run(config, Share(range(1), 1))[1][-1]
    assert lack in describe_dry_run(config, Share(servers=1))[1][-1]
    # A learner's servers compute elsewhere.
    _, obstacles = describe_dry_run(config, Share(range(1)))
    assert not [obstacle for obstacle in obstacles if lack in obstacle]


def test_a_dry_run_without_an_environment_says_what_it_would_wait_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    config = small_config(model={"path": str(tmp_path)}, environments=[])
    text, _ = describe_dry_run(config, Share(range(1), 1))
    assert "Warning: the settings have no environment: the first step waits" in text
    own_loop = small_config(
        model={"path": str(tmp_path)},
        environments=[],
        controller={"client_loop": True},
        learner={"shared_prefix_tokens": 0},
    )
    text, _ = describe_dry_run(own_loop, Share(range(1), 1))
    assert "no environment" not in text


async def test_missing_packages_are_no_fault_of_the_settings(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    monkeypatch.setitem(machine.NEEDED, "learner", (("torch-of-elsewhere",),))
    monkeypatch.setitem(machine.NEEDED, "rollout server", (("vllm-of-elsewhere",),))
    path = tmp_path / "run.toml"
    path.write_text(dump_config(small_config(model={"path": str(tmp_path)})))
    with pytest.raises(SlipstreamError) as raised:
        await run_all(path, [f'run.dir="{tmp_path}"'], dry_run=True)
    # The command's exit code is 2 for a ConfigError, else 1.
    assert not isinstance(raised.value, ConfigError)
    assert "the learner needs torch-of-elsewhere, not installed here: " in str(
        raised.value
    )
    assert "the rollout server needs vllm-of-elsewhere" in str(raised.value)
    assert tomllib.loads(capsys.readouterr().out)["run"]["name"] == "test"


def test_ranks_that_cannot_keep_a_batch_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    sampling = {"max_reply_tokens": 1 << 16, "max_episode_tokens": 1 << 17}
    config = small_config(
        model={"path": str(tmp_path)},
        sampling=sampling,
        algorithm={"groups_per_step": 1 << 12, "group_size": 64},
        rollout_server={"max_episodes": 64},
        learner={"micro_batch_tokens": 1 << 17},
        queue={"max_bytes": 1 << 60},
    )
    # 2^35 tokens of 46 bytes are 1,472 GiB for each rank, and a third of that is expected.
    finding = fit.check_batches(Scene(config, share=Share(range(8, 16))))
    assert finding is not None
    assert finding.verdict is Verdict.PROBLEM
    assert "they keep 3,925.3 GiB of a batch" in finding.seen
    assert finding.remedy == (
        "lower algorithm.groups_per_step, or spread the ranks over more machines"
    )
    # With the first ranks starts the controller, which holds 2^18 trajectories in each of 4.6
    # batches: three that may wait, and more.
    first = fit.check_batches(Scene(config, share=Share(range(8))))
    assert first is not None
    trajectory_bytes = 24 * (1 << 17) + 2048
    batch_gib = trajectory_bytes * (1 << 18) / (1 << 30)
    controller_gib = batch_gib * (3 + CONTROLLER_FURTHER_BATCHES) / 3
    assert (
        f"they and the controller keep {3925.33 + controller_gib:,.1f} GiB"
        in first.seen
    )
    controller = config.controller.model_copy(update={"client_loop": True})
    own_loop = config.model_copy(update={"controller": controller})
    assert fit.check_batches(Scene(own_loop, share=Share(range(8)))) is None
    few = fit.check_batches(Scene(small_config(model={"path": str(tmp_path)})))
    assert few is not None
    assert few.verdict is Verdict.OK


EIGHT_WORKERS = {"tensor_parallel_size": 8}


def gpu_obstacles(config: Config, share: Share) -> list[str]:
    _, obstacles = describe_dry_run(config, share)
    return [obstacle for obstacle in obstacles if "GPU memory" in obstacle]


def with_gpus(monkeypatch: pytest.MonkeyPatch, *, count: int, gib: int) -> None:
    """Lets this machine have so many GPUs."""
    memory_bytes = gib << 30
    gpus = tuple(Gpu(n, f"GPU-{n}", "NVIDIA H200", memory_bytes) for n in range(count))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for module in (fit, launcher, placement):
        monkeypatch.setattr(module, "uses_gpus", lambda: True)
    for module in (fit, placement):
        monkeypatch.setattr(module, "list_gpus", lambda: gpus)


def published(
    folder: Path,
    model: dict[str, Any],
    **tables: dict[str, Any],
) -> Config:
    (folder / "config.json").write_text(json.dumps(model))
    return small_config(
        model={
            "path": str(folder),
            "dtype": "bfloat16",
        },
        sampling={
            "max_reply_tokens": 4000,
            "max_episode_tokens": 8192,
        },
        learner={"micro_batch_tokens": 8192},
        queue={"max_bytes": 1 << 50},
        **tables,
    )


def test_a_model_that_fits_no_engine_here_is_refused_with_the_arithmetic(
    tmp_path, monkeypatch
):
    with_gpus(monkeypatch, count=8, gib=140)
    config = published(tmp_path, DEEPSEEK_V3, rollout_server=EIGHT_WORKERS)
    (line,) = gpu_obstacles(config, Share(servers=1))
    assert (
        "over rollout_server.tensor_parallel_size 8 are 168.0 GB for each worker"
        in line
    )
    assert "0.9 of a GPU of 150.3 GB: an engine runs on one host" in line
    quantized = EIGHT_WORKERS | {"quantization": "fp8_per_channel"}
    config = published(tmp_path, DEEPSEEK_V3, rollout_server=quantized)
    assert gpu_obstacles(config, Share(servers=1)) == []


def test_stages_divide_the_layers_that_an_engine_needs_room_for(tmp_path, monkeypatch):
    with_gpus(monkeypatch, count=8, gib=140)
    stages = {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}
    config = published(tmp_path, DEEPSEEK_V3, rollout_server=stages)
    (line,) = gpu_obstacles(config, Share(servers=1))
    assert (
        "over rollout_server.tensor_parallel_size 2 * pipeline_parallel_size 4 are "
        in line
    )
    sizes = read_model_sizes(tmp_path)
    vocabulary = sizes.hidden * sizes.vocab
    # 16 of 61 layers, and the embedding or the head; two bytes a parameter, two workers.
    of_stage = (sizes.parameters - 2 * vocabulary) * 16 / 61 + vocabulary
    assert f"are {of_stage / 1e9:,.1f} GB for each worker" in line


def test_a_rank_without_room_for_its_state_is_refused(tmp_path, monkeypatch):
    with_gpus(monkeypatch, count=2, gib=80)
    config = published(tmp_path, QWEN3_235B)
    (line,) = gpu_obstacles(config, Share(range(1)))
    assert (
        "a trainer rank needs 4.2 TB of weights, gradients and optimizer state" in line
    )
    assert "and has 85.9 GB of a GPU: raise learner.parallel.tp" in line


def test_a_dry_run_without_gpus_says_which_it_needs(tmp_path, monkeypatch):
    for module in (fit, placement):
        monkeypatch.setattr(module, "uses_gpus", lambda: False)
        monkeypatch.setattr(module, "list_gpus", lambda: ())
    config = published(tmp_path, DEEPSEEK_V3, rollout_server=EIGHT_WORKERS)
    text, _ = describe_dry_run(config, Share(servers=1))
    assert (
        "an engine worker's 186.7 GB without cache: 1 of 8 parts of the weights" in text
    )
    assert gpu_obstacles(config, Share(servers=1)) == []


def test_a_journal_that_fills_the_disk_is_told_with_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(
        fit.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000_000)
    )
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    config = small_config(
        model={"path": str(tmp_path)},
        run={
            "steps": 1000,
            "dir": str(tmp_path),
        },
        algorithm={
            "groups_per_step": 8,
            "group_size": 4,
        },
        sampling={
            "max_reply_tokens": 64,
            "max_episode_tokens": 1000,
        },
    )
    # A third of 32 * (2,048 + 24 * 1,000) bytes are 277,845; 10 MB hold 35 of them.
    text, _ = describe_dry_run(config, Share(range(1), 1))
    (line,) = [line for line in text.splitlines() if "batches of episodes" in line]
    assert "fill the 10.0 MB that are free" in line
    assert (
        "after 35 of 1,000 steps: set checkpoint.keep_batches = false, or run.dir"
        in line
    )
    run = config.run.model_copy(update={"steps": 30})
    short = config.model_copy(update={"run": run})
    assert fit.journal_warning(short) == ""
    # Ranks of further hosts write no journal.
    text, _ = describe_dry_run(config, Share(range(1, 2)))
    assert "batches of episodes" not in text
