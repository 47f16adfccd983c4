"""The conversations of an agent as one record, one branch after the other."""

import numpy as np
from slipstream.core.types import (
    DROPPED_METRICS,
    Branch,
    PolicyVersion,
    RoutedExperts,
    VersionSpan,
)
from slipstream.protocol.bounds import check_bounds
from slipstream.rollout_server.agents.conversations import Conversations
from slipstream.rollout_server.engine_interface import (
    FinishReason,
    Generation,
    Sampling,
)
from slipstream.rollout_server.episodes.recording import Recording
from slipstream.v1 import trajectory_pb2


def generation(tokens: list[int], experts: list[int] | None = None) -> Generation:
    return Generation(
        np.asarray(tokens, dtype=np.uint32),
        -np.asarray(tokens, dtype=np.float32),
        (VersionSpan(len(tokens), PolicyVersion(0, 1)),),
        FinishReason.STOP,
        expert_ids=None
        if experts is None
        else np.asarray(experts, dtype=np.uint8)[:, None, None],
    )


def test_branches_follow_each_other_with_their_shares_rewards_and_names() -> None:
    talks = Conversations()
    turn = talks.finish(talks.begin("", None, [1, 2]), generation([10, 11]))
    talks.finish(talks.begin("", turn, [3]), generation([12]))
    talks.finish(talks.begin("reviewer", turn, [4]), generation([13]))
    recording = Recording()
    recording.take_branches(talks, {"reviewer": 0.5, "nobody": 3.0}, {"reviewer": 0.0})
    assert recording.token_ids == [1, 2, 10, 11, 3, 12, 1, 2, 10, 11, 4, 13]
    assert recording.run_lengths == [2, 2, 1, 1, 5, 1]
    assert recording.sampled_arrays["behavior_logprobs"].tolist() == [
        -10,
        -11,
        -12,
        -13,
    ]
    assert sum(span.length for span in recording.spans) == recording.num_sampled == 4
    assert len(recording.sampled) == 3
    assert recording.branches == (Branch(4), Branch(2, 0.5, "reviewer", 0.0))
    assert recording.expert_ids == []


def test_experts_of_each_branch_cover_its_tokens_but_the_last() -> None:
    talks = Conversations()
    turn = talks.finish(talks.begin("", None, [1, 2]), generation([10], [0, 1]))
    talks.finish(talks.begin("", turn, [3]), generation([11], [2, 3]))
    # A reply that was cancelled before its experts came.
    talks.finish(talks.begin("", None, [5]), generation([12]))
    talks.finish(talks.begin("", None, [6]), generation([13], [4]))
    recording = Recording()
    recording.take_branches(talks, {}, {})
    experts = RoutedExperts.of_parts(
        recording.expert_ids, 8, num_tokens=len(recording.token_ids)
    )
    assert experts.expert_ids[:, 0, 0].tolist() == [0, 1, 2, 3, 255, 255, 255, 4, 255]
    assert recording.token_ids == [1, 2, 10, 3, 11, 5, 12, 6, 13]


def test_an_episode_without_a_reply_is_empty() -> None:
    recording = Recording()
    recording.take_branches(Conversations(), {}, {})
    assert (recording.token_ids, recording.branches) == ([], ())


def test_a_metric_with_a_name_that_the_run_measures_stays_apart_and_none_is_lost_untold() -> (
    None
):
    names = [
        "reward",
        "pass_at_4",
        "num_failed",
        "turn_rewards/1",
        "ignored/seed",
        "rewards",
    ]
    recording = Recording(metrics={name: 0.5 for name in names})
    recording.counts["ignored/seed"] = 2
    metrics = {f"metric/{name}": 0.5 for name in names[:-1]} | {
        "rewards": 0.5,
        "ignored/seed": 2.0,
    }
    assert recording.short_metrics == metrics
    # Names that only differ behind their 40th character, and a metric for which no room is left.
    recording.metrics |= {"long" * 10 + end: 0.0 for end in "ab"}
    recording.metrics |= {f"{number}": 0.0 for number in range(10)}
    assert recording.short_metrics[DROPPED_METRICS] == 2


def test_a_metric_with_a_name_of_wide_characters_fits_a_trajectory() -> None:
    recording = Recording(metrics={"😀" * 50: 0.5, "é" * 50: 1.0})
    recording.counts["ignored/" + "😀" * 50] = 2
    short_metrics = recording.short_metrics
    assert short_metrics == {"😀" * 32: 0.5, "é" * 40: 1.0, "ignored/" + "😀" * 30: 2.0}
    check_bounds(trajectory_pb2.Trajectory(metrics=short_metrics))


SAMPLING = Sampling(1.0, 1.0, 0, 8, 8, 6, max_total_tokens=10, max_branches=2)


def test_another_conversation_of_an_environment_begins_a_branch() -> None:
    recording = Recording()
    assert recording.room(SAMPLING) == recording.room(SAMPLING, is_new=True) == 6
    recording.add_context([1, 2])
    recording.add_generation(generation([10], [0, 1]))
    assert (recording.branches, recording.num_routed) == ((), 2)
    assert (recording.room(SAMPLING), recording.room(SAMPLING, is_new=True)) == (3, 6)
    recording.begin_branch()
    assert (recording.conversation, recording.num_routed) == ([], recording.start)
    recording.add_context([3, 4])
    recording.add_generation(generation([11], [5, 6]))
    assert recording.conversation == [3, 4, 11]
    assert recording.branches == (Branch(2), Branch(2))
    # Four of all tokens are left, three of the branch, and no third branch.
    assert (recording.room(SAMPLING), recording.room(SAMPLING, is_new=True)) == (3, 0)
    recording.add_context([5])
    assert (recording.conversation, recording.num_routed) == (
        [3, 4, 11, 5],
        recording.start + 2,
    )
    recording.add_generation(generation([12], [7, 4]))
    assert recording.branches == (Branch(2), Branch(4))
    assert recording.token_ids == [1, 2, 10, 3, 4, 11, 5, 12]
    experts = RoutedExperts.of_parts(recording.expert_ids, 8, num_tokens=8)
    assert experts.expert_ids[:, 0, 0].tolist() == [0, 1, 255, 5, 6, 7, 4, 255]
