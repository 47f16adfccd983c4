"""When cuts are replayed, what they may take, and how they come to the learner."""

import json
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.kept_tokens import MAX_KEPT_TOKENS, KeptTokens
from slipstream.core.settings.config import Config
from slipstream.core.types import Branch, Trajectory
from slipstream.extensions.sampling_replay.settings import (
    check_vocabulary,
    engine_arguments,
)
from slipstream.extensions.sampling_replay.trainer import KeptTokenCounts
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import (
    TrainingSequence,
    share_of_rank,
)
from support.fakes.packed import packed
from support.fakes.plain_trajectory import plain_trajectory
from support.fakes.small_configs import NGRAM, config_with

CUT = {"sampling.top_k": 4}


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_each_cut_is_replayed(name: str) -> None:
    values = {"top_p": 0.5, "top_k": 3, "min_p": 0.5}
    assert not config_with().replays_sampling
    assert config_with({f"sampling.{name}": values[name]}).replays_sampling


@pytest.mark.parametrize(
    "excluding",
    [
        {"sampling.max_images": 1},
        {"rollout_server.engine": {"speculative_config": NGRAM}},
    ],
)
def test_settings_without_records_replay_no_cut(excluding: dict[str, Any]) -> None:
    config = config_with(CUT | excluding | {"algorithm.weight": "none"})
    assert not config.replays_sampling


def test_a_trajectory_reserves_room_for_the_largest_sets() -> None:
    uncut = config_with()
    per_token = 2 + 3 * 4
    more = config_with(CUT).trajectory_bytes() - uncut.trajectory_bytes()
    assert more == per_token * uncut.sampling.total_tokens
    without_top_k = config_with({"sampling.top_p": 0.5})
    more = without_top_k.trajectory_bytes() - uncut.trajectory_bytes()
    assert more == (2 + 3 * MAX_KEPT_TOKENS) * uncut.sampling.total_tokens


def test_servers_and_controller_must_agree_that_a_cut_is_replayed() -> None:
    drafts = {"rollout_server.engine": {"speculative_config": NGRAM}}
    without_records = config_with(CUT | drafts | {"algorithm.weight": "none"})
    assert '"sampling is replayed": false' in without_records.engine_settings
    assert '"sampling is replayed": true' in config_with(CUT).engine_settings


def make_config_file(folder: Path, *, vocab_size: int) -> Path:
    folder.mkdir()
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
    }
    file = folder / "config.json"
    file.write_text(json.dumps(fields))
    return folder


def of_model(path: Path, **sampling: float) -> Config:
    changes = {f"sampling.{name}": value for name, value in sampling.items()}
    return config_with({"model.path": str(path), **changes})


def test_a_large_vocabulary_needs_a_bound_of_its_sets(tmp_path: Path) -> None:
    small = make_config_file(tmp_path / "small", vocab_size=1024)
    large = make_config_file(tmp_path / "large", vocab_size=2000)
    check_vocabulary(of_model(small, top_p=0.8))
    check_vocabulary(of_model(large, top_p=0.8, top_k=20))
    refusal = (
        r"sampling.top_p = 0.8 may keep any number of the model's 2000 tokens, .* set "
        "sampling.top_k to at most 1024, got 0"
    )
    with pytest.raises(ConfigError, match=refusal):
        check_vocabulary(of_model(large, top_p=0.8))


def test_the_engine_is_asked_for_what_it_kept() -> None:
    arguments = engine_arguments(config_with(CUT), None, on_cpu=True)
    assert arguments == {"return_sampling_mask": True}


def cut_trajectories() -> tuple[Trajectory, Trajectory]:
    """Two prompt tokens and two sampled ones; of the second, one prompt token and one sampled."""
    sets = KeptTokens.of_sets([[6, 5], [7]])
    cut = plain_trajectory(
        token_ids=[1, 2, 5, 7],
        run_lengths=(2, 2),
        kept_tokens=sets.packed(),
    )
    uncut = plain_trajectory(
        token_ids=[3, 4],
        run_lengths=(1, 1),
    )
    return cut, uncut


def test_sets_stand_where_their_tokens_are_predicted() -> None:
    sequences = TrainingSequence.of_trajectories(cut_trajectories(), step=0)
    micro_batch = packed(
        sequences,
        [1, 0],
        multiple=8,
        sequence_multiple=4,
    )
    nothing = [0, 0]
    assert micro_batch.kept_ids is not None
    rows = micro_batch.kept_ids.tolist()
    assert rows[:4] == [nothing] * 4
    assert rows[4:8] == [nothing, [6, 7], [8, 0], nothing]


def test_a_segment_has_the_sets_of_the_tokens_that_it_predicts() -> None:
    # The first branch has the tokens 1, 2, 5 and 7, the second one a prompt and a sampled token.
    branched = plain_trajectory(
        token_ids=[1, 2, 5, 7, 3, 9],
        run_lengths=(2, 2, 1, 1),
        kept_tokens=KeptTokens.of_sets([[6, 5], [7], [8, 9, 4]]).packed(),
        branches=(Branch(2), Branch(2)),
    )
    first, second = TrainingSequence.of_trajectories([branched], step=0)
    assert first.kept_sets is not None
    assert second.kept_sets is not None
    assert first.kept_sets.table(0, 2).tolist() == [[0, 0], [6, 7]]
    assert first.kept_sets.table(2, 4).tolist() == [[8], [0]]
    assert second.kept_sets.table(0, 2).tolist() == [[5, 9, 10], [0, 0, 0]]


def test_a_micro_batch_is_as_wide_as_its_own_sets() -> None:
    cut, uncut = cut_trajectories()
    sequences = TrainingSequence.of_trajectories([uncut, cut], step=0)
    micro_batch = packed(sequences, [0])
    assert micro_batch.kept_ids is not None
    assert micro_batch.kept_ids.shape == (2, 0)
    micro_batch = packed(sequences, [0, 1])
    assert micro_batch.kept_ids is not None
    assert micro_batch.kept_ids.shape == (6, 2)


def test_context_parallel_ranks_get_the_sets_of_their_tokens() -> None:
    sequences = TrainingSequence.of_trajectories(cut_trajectories(), step=0)
    micro_batch = packed(
        sequences,
        [0],
        multiple=4,
        sequence_multiple=4,
    )
    rows = []
    for rank in range(2):
        share = share_of_rank(micro_batch, rank, 2)
        assert share.kept_ids is not None
        rows.append(share.kept_ids.tolist())
    assert rows == [
        [[0, 0], [0, 0]],
        [[6, 7], [8, 0]],
    ]


def test_without_any_cut_there_is_no_field_of_sets() -> None:
    _, uncut = cut_trajectories()
    (sequence,) = TrainingSequence.of_trajectories([uncut], step=0)
    assert sequence.kept_ids is None


def test_metrics_count_kept_tokens_and_tokens_without_a_record() -> None:
    trajectory = plain_trajectory(
        token_ids=[1, 2, 3],
        run_lengths=(1, 2),
        is_given=True,
    )
    trajectories = (*cut_trajectories(), trajectory)
    policy: Any = None
    counts = KeptTokenCounts()
    metrics = counts.ends(policy, Batch(0, "batch", trajectories))
    assert metrics == {
        "kept_tokens_mean": 1.5,
        "kept_tokens_unrecorded": pytest.approx(1 / 3),
    }
    metrics_of_given = counts.ends(policy, Batch(0, "batch", (trajectory,)))
    assert metrics_of_given == {
        "kept_tokens_mean": 0.0,
        "kept_tokens_unrecorded": 0.0,
    }
