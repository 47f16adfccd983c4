import json
import math
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.configuration.automatic import completed, describe_choices
from slipstream.core.configuration.config_file import dump_config, load_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
LARGE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LARGE |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def chosen(folder: Path, model: dict[str, Any] = TINY, **tables: Any) -> Config:
    """The settings of a file with model, environment, steps and `tables`."""
    (folder / "model").mkdir(exist_ok=True)
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 256,
        **model,
    }
    (folder / "model" / "config.json").write_text(json.dumps(fields))
    table = {
        "run": {"steps": 90, "dir": str(folder), **tables.pop("run", {})},
        "model": {
            "path": str(folder / "model"),
            "dtype": tables.pop("dtype", "bfloat16"),
        },
        "environments": [{"reference": "a.b:Sums"}],
    }
    return Config.model_validate(completed(table | tables))


def test_a_run_is_named_by_its_model_and_environments(tmp_path: Path) -> None:
    config = chosen(tmp_path)
    assert (config.run.name, config.environments[0].name) == ("model-sums", "sums")
    named = chosen(
        tmp_path, run={"name": "mine"}, environments=[{"reference": "a:B", "name": "c"}]
    )
    assert (named.run.name, named.environments[0].name) == ("mine", "c")
    measured = [{"reference": "a.b:Sums", "every_steps": 5}]
    also = chosen(tmp_path, evaluations=measured)
    assert (also.run.name, also.evaluations[0].name) == (
        "model-sums",
        "sums-evaluation",
    )


def test_a_stated_value_wins_and_the_others_follow_it(tmp_path: Path) -> None:
    config = chosen(
        tmp_path, algorithm={"group_size": 4, "mini_batches": 3, "learning_rate": 0.5}
    )
    assert (config.algorithm.group_size, config.algorithm.learning_rate) == (4, 0.5)
    assert config.algorithm.groups_per_step == 30
    assert config.rollout_server.max_episodes == 120
    assert "algorithm.group_size" not in config.automatic
    assert "algorithm.groups_per_step" in config.automatic
    # The rate and the group were stated.
    text = describe_choices(config)
    num_others = len(config.automatic) - 3
    assert text == (
        "algorithm.groups_per_step 30, sampling.max_reply_tokens 192, "
        f"rollout_server.max_episodes 120, and {num_others} more, in {config.run_dir}/config.toml "
        "under automatic"
    )


def test_lengths_are_those_of_the_model(tmp_path: Path) -> None:
    config = chosen(tmp_path)
    sampling = config.sampling
    assert (sampling.max_episode_tokens, sampling.max_reply_tokens) == (256, 192)
    assert config.learner.micro_batch_tokens == 4096
    long = {"max_position_embeddings": 131072}
    assert chosen(tmp_path, TINY | long).sampling.max_episode_tokens == 4096
    settings = chosen(
        tmp_path, TINY | long, sampling={"max_reply_tokens": 9000}
    ).sampling
    assert (settings.max_reply_tokens, settings.max_episode_tokens) == (9000, 12000)
    whole = chosen(tmp_path, TINY | long, sampling={"max_episode_tokens": 20000})
    assert whole.sampling.max_reply_tokens == 15000
    assert whole.learner.micro_batch_tokens == 20000
    split = {"world_size": 3, "parallel": {"cp": 3}}
    uneven = chosen(
        tmp_path, TINY | long, sampling={"max_episode_tokens": 20000}, learner=split
    )
    assert uneven.learner.micro_batch_tokens == 8192


@pytest.mark.parametrize(
    ("model", "lora", "rate", "groups"),
    [
        (TINY, {}, 1e-3, 16),
        (TINY, {"rank": 8}, 3e-3, 16),
        (LARGE, {}, 1e-6, 64),
        (LARGE, {"rank": 8}, 1e-5, 64),
    ],
)
def test_larger_models_take_smaller_steps(
    model: dict[str, Any],
    lora: dict[str, Any],
    rate: float,
    groups: int,
    tmp_path: Path,
) -> None:
    algorithm = chosen(tmp_path, model, lora=lora).algorithm
    assert math.isclose(algorithm.learning_rate, rate)
    assert algorithm.groups_per_step == groups


def test_weights_have_time_and_room_by_their_bytes(tmp_path: Path) -> None:
    def found(model: dict[str, Any]) -> tuple[float, ...]:
        config = chosen(tmp_path, model)
        weights = config.weights
        return (
            weights.bucket_mib,
            weights.bucket_deadline_s,
            weights.join_deadline_s,
            config.learner.timeout_s,
            config.rollout_server.tensor_parallel_size,
        )

    assert found(TINY) == (64, 2.0, 20.0, 600.0, 1)
    assert found(LARGE) == (512, 60.0, 120.0, 1800.0, 1)
    assert found(LARGE | {"num_hidden_layers": 320}) == (512, 60.0, 120.0, 1800.0, 4)


def test_stages_leave_less_for_each_worker_to_hold(tmp_path: Path) -> None:
    model = LARGE | {"num_hidden_layers": 320}
    stages = {"pipeline_parallel_size": 2}
    assert (
        chosen(tmp_path, model, rollout_server=stages).rollout_server.num_workers
        == 2 * 2
    )


SMALL = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16}
SMALL |= {"num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151936}
SMALL |= {"head_dim": 128, "tie_word_embeddings": True}
MIDDLE = SMALL | {"hidden_size": 2048, "intermediate_size": 6144}
# The width of Qwen3-30B-A3B.
WIDE_MIXTURE = SMALL | {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
WIDE_MIXTURE |= {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}
WIDE_MIXTURE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
LONG = {"max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("model", "tables", "tokens"),
    [
        (SMALL, {}, 32768),
        (MIDDLE, {}, 16384),
        (LARGE, {}, 8192),
        (WIDE_MIXTURE, {}, 16384),
        (LARGE, {"learner": {"world_size": 4, "parallel": {"tp": 4}}}, 16384),
        (LARGE, {"sampling": {"max_episode_tokens": 20000}}, 20000),
        # On CPUs, where a longer micro batch is no faster and takes more memory.
        (SMALL, {"dtype": "float32"}, 8192),
        (TINY, {}, 8192),
    ],
)
def test_micro_batches_are_long_enough_for_a_gpu(model, tables, tokens, tmp_path):
    config = chosen(tmp_path, model | {"max_position_embeddings": 32768}, **tables)
    assert config.learner.micro_batch_tokens == tokens


@pytest.mark.parametrize(
    ("model", "tables", "episodes"),
    [
        # Three open steps of 128 episodes, with half of 1,152 tokens each.
        (SMALL, {"sampling": {"max_episode_tokens": 1152}}, 384),
        (
            SMALL,
            {
                "sampling": {"max_episode_tokens": 1152},
                "algorithm": {"max_staleness": 0},
            },
            128,
        ),
        (
            SMALL,
            {
                "sampling": {"max_episode_tokens": 1152},
                "algorithm": {"max_staleness": 7},
            },
            512,
        ),
        # 70 GB hold the weights and so many halves of 4,096 tokens.
        (SMALL, {}, 292),
        # Replies of 1,024 tokens are half as long.
        (SMALL, {"sampling": {"max_reply_tokens": 1024}}, 384),
        (LARGE, {}, 200),
        (LARGE | {"num_hidden_layers": 126}, {}, 78),
        (SMALL, {"dtype": "float32"}, 128),
        (TINY, {}, 128),
        (SMALL, {"rollout_server": {"engine": {"max_num_batched_tokens": 100}}}, 100),
    ],
)
def test_a_server_has_episodes_of_all_open_steps_as_far_as_its_cache_goes(
    model: dict[str, Any], tables: dict[str, Any], episodes: int, tmp_path: Path
) -> None:
    config = chosen(tmp_path, model | LONG, **tables)
    assert config.rollout_server.max_episodes == episodes


def test_settings_that_need_others_bring_them(tmp_path: Path) -> None:
    assert not chosen(tmp_path).learner.offload.gives_memory_back
    assert chosen(
        tmp_path, controller={"turns": "sleep"}
    ).learner.offload.gives_memory_back
    environments = [{"reference": "a:B", "adapter": "one"}]
    config = chosen(
        tmp_path, lora={"rank": 4, "adapters": ["one"]}, environments=environments
    )
    assert config.lora.publishes_adapters


def test_mixtures_replay_their_routing_where_it_can_be_recorded(tmp_path: Path) -> None:
    def found(**tables: Any) -> str:
        return chosen(tmp_path, TINY | MIXTURE, **tables).algorithm.router_replay

    assert chosen(tmp_path).algorithm.router_replay == "off"
    assert found() == "rollout"
    assert found(sampling={"stop": ["."]}) == "off"
    assert (
        found(rollout_server={"engine": {"speculative_config": {"method": "ngram"}}})
        == "off"
    )
    assert found(lora={"rank": 4}) == "rollout"
    assert found(lora={"rank": 4}, algorithm={"kl": {"coefficient": 0.1}}) == "off"
    assert found(algorithm={"router_replay": "off"}) == "off"
    # The queue holds what routing adds.
    assert found(queue={"max_bytes": 1 << 20}) == "off"


def test_a_queue_holds_the_batches_that_may_be_ahead(tmp_path: Path) -> None:
    algorithm = {"group_size": 256, "groups_per_step": 64, "max_staleness": 3}
    sampling = {"max_episode_tokens": 256, "max_reply_tokens": 64}
    config = chosen(tmp_path, algorithm=algorithm, sampling=sampling)
    assert config.queue.max_bytes == 4 * 64 * 256 * config.trajectory_bytes()


def test_a_run_that_goes_on_keeps_what_it_chose(tmp_path: Path) -> None:
    config = chosen(tmp_path)
    assert "algorithm.group_size" in config.automatic
    config.run_dir.mkdir()
    text = dump_config(config).replace("group_size = 8", "group_size = 12")
    (config.run_dir / "config.toml").write_text(text)
    # The file of the run holds what another release would have chosen.
    again = chosen(tmp_path, run={"steps": 200}, algorithm={"groups_per_step": 5})
    assert (again.algorithm.group_size, again.algorithm.groups_per_step) == (12, 5)
    # A recorded size that cannot go with what is stated now is chosen anew.
    text = dump_config(config).replace("max_bytes = 268435456", "max_bytes = 20000000")
    (config.run_dir / "config.toml").write_text(text)
    assert chosen(tmp_path).queue.max_bytes == 20000000
    wide = chosen(tmp_path, algorithm={"groups_per_step": 512})
    assert wide.queue.max_bytes == 256 << 20
    assert chosen(tmp_path, run={"resume": "never"}).algorithm.group_size == 8
    assert chosen(tmp_path, run={"name": "other"}).algorithm.group_size == 8
    (config.run_dir / "config.toml").write_text("damaged [")
    assert chosen(tmp_path).algorithm.group_size == 8


def test_a_run_goes_on_with_what_an_earlier_release_chose(tmp_path: Path) -> None:
    config = chosen(tmp_path)
    assert config.algorithm.warmup_steps == 0
    config.run_dir.mkdir()
    text = dump_config(config).replace("warmup_steps = 0", "warmup_steps = 3", 1)
    text = text.replace("automatic = [", 'automatic = ["algorithm.warmup_steps", ', 1)
    (config.run_dir / "config.toml").write_text(text)
    assert chosen(tmp_path).algorithm.warmup_steps == 3
    assert chosen(tmp_path, run={"name": "other"}).algorithm.warmup_steps == 0


def test_a_folder_that_is_no_model_is_left_to_its_check(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[run]\nsteps = 1\n[model]\npath = "nowhere"\n')
    assert load_config(tmp_path / "run.toml").sampling.max_episode_tokens == 4096


def test_settings_need_no_file() -> None:
    assert load_config(None, ["run.steps=4", "model.path=models/tiny"]).run.steps == 4
    with pytest.raises(ConfigError, match=r"^command line: run\.steps is required$"):
        load_config(None, ["model.path=models/tiny"])
    with pytest.raises(
        ConfigError, match=r"^command line: algorithm\.group_size: input should"
    ):
        load_config(None, ["run.steps=4", "model.path=m", "algorithm.group_size=x"])


def test_the_page_has_every_setting_that_a_run_chooses(tmp_path: Path) -> None:
    page = Path(__file__).parents[4] / "docs" / "configuration.md"
    _, _, rest = page.read_text().partition("## What a run chooses by itself\n")
    rows = rest.partition("\n## ")[0]
    for key in chosen(tmp_path).automatic:
        assert f"{key.rpartition('.')[2]}`" in rows, key
