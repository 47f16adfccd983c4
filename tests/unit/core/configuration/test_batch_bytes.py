"""What a batch takes, by hand for two layouts."""

import json
from pathlib import Path

from slipstream.core.configuration.batch_bytes import RANK_BYTES_PER_TOKEN, BatchBytes
from slipstream.core.models.model_sizes import read_model_sizes
from support.fakes.small_configs import small_config

# 4 layers of 128 experts, of which a token goes to 8: 32 bytes a token.
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


SETTINGS = {
    "algorithm": {"groups_per_step": 8, "group_size": 4},
    "sampling": {"max_reply_tokens": 64, "max_episode_tokens": 100},
    "learner": {"world_size": 8, "parallel": {"tp": 2, "pp": 2, "ep": 4, "etp": 1}},
    "rollout_server": {"tensor_parallel_size": 2, "count": 3},
    "run": {"steps": 10},
    "checkpoint": {},
}


def bytes_of(folder: Path, **tables: dict[str, object]) -> BatchBytes:
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    changed = {name: values | tables.get(name, {}) for name, values in SETTINGS.items()}
    config = small_config(model={"path": str(folder)}, **changed)
    return BatchBytes.of(config, read_model_sizes(folder))


def test_a_rank_keeps_the_tokens_of_all_and_the_experts_of_its_own_episodes(tmp_path):
    recorded = bytes_of(tmp_path, algorithm={"router_replay": "rollout"})
    plain = bytes_of(tmp_path, algorithm={"router_replay": "off"})
    tokens = 8 * 4 * 100
    assert recorded.experts_per_token == 32
    assert plain.rank == tokens * RANK_BYTES_PER_TOKEN
    # Two ranks of data parallelism: tp 2 and pp 2 of eight ranks.
    assert recorded.rank - plain.rank == tokens * 32 // 2
    assert recorded.batch - plain.batch == tokens * 32


def test_a_rank_keeps_the_tokens_that_sampled_tokens_were_drawn_from(tmp_path):
    num_bytes = bytes_of(tmp_path)
    cut = bytes_of(tmp_path, sampling={"top_k": 20})
    # The vocabulary has 100 tokens.
    uncounted = bytes_of(tmp_path, sampling={"top_p": 0.9})
    tokens = 8 * 4 * 100
    # A number of tokens in two bytes, and ids of three bytes.
    assert cut.rank - num_bytes.rank == tokens * (2 + 3 * 20)
    assert uncounted.rank - num_bytes.rank == tokens * (2 + 3 * 100)
    lines = [*cut.describe(num_steps=10)]
    assert "62 of them the tokens that it was drawn from" in lines[1]


def test_each_stage_of_an_engine_receives_the_weights_and_keeps_its_layers(tmp_path):
    whole = bytes_of(tmp_path)
    staged = bytes_of(
        tmp_path,
        rollout_server={
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "count": 3,
        },
    )
    assert staged.communicator_ranks - whole.communicator_ranks == 3 * 2
    sizes = read_model_sizes(tmp_path)
    vocabulary = sizes.hidden * sizes.vocab
    item_bytes = whole.weights // sizes.parameters
    of_stage = (sizes.parameters - 2 * vocabulary) // 2 + vocabulary
    assert staged.worker == of_stage * item_bytes // 2


def test_images_count_for_each_episode_and_not_for_a_token(tmp_path):
    num_bytes = bytes_of(tmp_path)
    images = {"max_images": 2, "max_image_bytes": 1000}
    shown = bytes_of(tmp_path, sampling=images)
    assert shown.batch - num_bytes.batch == 32 * 2000
    assert shown.rank - num_bytes.rank == 32 * 2000
    assert shown.per_token == num_bytes.per_token
    lines = [*shown.describe(num_steps=10)]
    assert "an episode's images 2.0 kB" in lines[1]


def test_the_journal_keeps_all_batches_or_those_behind_the_oldest_checkpoint(tmp_path):
    num_bytes = bytes_of(tmp_path)
    checkpoint = {"keep_batches": False, "every_steps": 2, "keep_last": 3}
    short = bytes_of(tmp_path, checkpoint=checkpoint)
    assert num_bytes.journal == 10 * num_bytes.batch
    assert short.journal == 6 * short.batch


def test_weights_travel_from_each_stage_and_expert_rank_to_every_worker(tmp_path):
    sizes = bytes_of(tmp_path)
    assert sizes.communicator_ranks == 2 * 4 + 3 * 2
    assert sizes.worker == sizes.weights // 2


def test_the_lines_name_the_setting_that_bounds_each_figure(tmp_path):
    recorded = bytes_of(tmp_path, algorithm={"router_replay": "rollout"})
    lines = [*recorded.describe(num_steps=10)]
    assert lines[0].startswith("If each of a step's 32 episodes has 100 tokens")
    assert "32 of them recorded experts" in lines[1]
    assert lines[2].endswith("on a host of 8 ranks")
    assert "queue.max_bytes" in lines[3]
    assert "after 10 steps" in lines[4]
    assert "14 processes exchange them" in lines[5]
