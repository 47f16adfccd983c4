import json
import tomllib
from pathlib import Path

import pytest
from slipstream.client.launch import fit, machine
from slipstream.client.launch.findings import Scene, Verdict
from slipstream.client.launch.launcher import describe_dry_run, run_all
from slipstream.client.launch.placement import Share
from slipstream.core.configuration.config_file import dump_config, parse_config
from slipstream.core.errors import ConfigError, SlipstreamError
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
    assert notes[12] == "# If each of a step's 32 episodes has 64 tokens, the most there can be:"
    sizes = [note.split(" ", 3)[:3] for note in notes[13:18]]
    assert sizes == [
        ["#", *words]
        for words in (
            ("a", "token"),
            ("a", "trainer"),
            ("trajectories", "that"),
            ("the", "journal"),
            ("weights", "are"),
        )
    ]
    assert [*notes[:12], *notes[19:23]] == [
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
    assert notes[24].startswith("# Warning: algorithm.max_staleness is 2 without a correction: ")


def test_a_dry_run_says_what_engines_lack_on_a_cpu(tmp_path, monkeypatch):
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
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


def test_a_dry_run_without_an_environment_says_what_it_would_wait_for(tmp_path: Path) -> None:
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


async def test_missing_packages_are_no_fault_of_the_settings(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    monkeypatch.setitem(machine.NEEDED, "learner", (("torch-of-elsewhere",),))
    monkeypatch.setitem(machine.NEEDED, "rollout server", (("vllm-of-elsewhere",),))
    path = tmp_path / "run.toml"
    path.write_text(dump_config(small_config(model={"path": str(tmp_path)})))
    with pytest.raises(SlipstreamError) as raised:
        await run_all(path, [f'run.dir="{tmp_path}"'], dry_run=True)
    # The command's exit code is 2 for a ConfigError, else 1.
    assert not isinstance(raised.value, ConfigError)
    assert "the learner needs torch-of-elsewhere, not installed here: " in str(raised.value)
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
    # 2^35 tokens of 37 bytes are 1.16 TiB for each rank, and a third of that is expected.
    finding = fit.check_batches(Scene(config, share=Share(range(8))))
    assert finding is not None
    assert finding.verdict is Verdict.PROBLEM
    assert "they keep 3,157.3 GiB of a batch" in finding.seen
    assert finding.remedy == (
        "lower algorithm.groups_per_step, or spread the ranks over more machines"
    )
    few = fit.check_batches(Scene(small_config(model={"path": str(tmp_path)})))
    assert few is not None
    assert few.verdict is Verdict.OK
