import copy
import dataclasses

import numpy as np
import pytest
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.settings.algorithm_section import KlSection
from slipstream.core.settings.role_sections import (
    ReferenceSection,
    ReferenceServerSection,
    TeacherSection,
)
from slipstream.core.types import (
    Branch,
    PolicyVersion,
    Purpose,
    ReferenceLogprobs,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
)
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.inspection import Inspector
from slipstream.protocol.codec import pack_tokens
from support.fakes.fake_trajectories import GOOD, plain_group
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import nothing, run_of

KEY = ServerKey(ServerId("a"), 0xF)
POLICY = ReferenceSection(policy=True)
RUN = run_of(
    algorithm={"max_staleness": 2},
    sampling={
        "max_reply_tokens": 8,
        "max_episode_tokens": 64,
        "max_total_tokens": 96,
        "max_branches": 2,
        "max_turns": 4,
        "max_images": 1,
        "max_image_bytes": 3,
    },
)
RUN.progress.reached(PolicyVersion(1, 7))
GROUP = plain_group(deadline_step=8, holder=KEY, allowed={KEY.epoch: range(3)})


def fault_of(
    trajectory: Trajectory,
    group: Group | None,
    *,
    vocabulary: int = 10,
    reference: ReferenceSection | None = None,
) -> str:
    run = copy.copy(RUN)
    kl = KlSection(coefficient=0.0 if reference is None else 0.1)
    algorithm = RUN.config.algorithm.model_copy(update={"kl": kl})
    run.config = RUN.config.model_copy(
        update={"reference": reference, "algorithm": algorithm}
    )
    books = books_of(run)
    books.fleet.epochs.join(KEY)
    inspector = Inspector(run, books, run_again=nothing)
    inspector._vocabulary = vocabulary
    return inspector.contradiction(trajectory, group)


def test_nothing_speaks_against_a_good_trajectory() -> None:
    assert fault_of(GOOD, GROUP) == ""
    # The trajectory's lease may be over.
    assert fault_of(GOOD, None) == ""


def sampled_by(incarnation: int, step: int) -> dict[str, object]:
    return {"version_spans": (VersionSpan(2, PolicyVersion(incarnation, step)),)}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"server_epoch": 0xE}, "no rollout server a ever had the epoch e"),
        ({"images": (b"1", b"2")}, "it has 2 images, sampling.max_images is 1"),
        (
            {"images": (b"1234",)},
            "it has an image of 4 bytes, sampling.max_image_bytes is 3",
        ),
        ({"server_id": ServerId("b")}, "no rollout server b ever had the epoch f"),
        (sampled_by(0, 8), "version 8 sampled it, the newest is 7/1"),
        (sampled_by(2, 7), "version 7/2 sampled it, the newest is 7/1"),
        (
            {"token_ids": np.array([1, 10, 3], np.uint32)},
            "token 10 is outside the vocabulary of 10",
        ),
        (
            {"kept_tokens": KeptTokens.of_sets([[1, 9], [2, 10]]).packed()},
            "kept token 10 is outside the vocabulary of 10",
        ),
        (
            {"behavior_logprobs": np.array([-0.5, 0.5], np.float32)},
            "a log-probability is 0.5, above 0",
        ),
        (
            {"behavior_logprobs": np.array([np.nan, -0.5], np.float32)},
            "a log-probability is nan, above 0",
        ),
        ({"seed": 5}, "it is about another task than g was leased for"),
        ({"environment": "f"}, "it is about another task than g was leased for"),
        ({"task_index": 0}, "it is about another task than g was leased for"),
        (
            {"purpose": Purpose.EVALUATION},
            "it is about another task than g was leased for",
        ),
        ({"attempt": 3}, "attempt 3 of g, which was leased for attempts 0 to 2"),
        ({"member": 2}, "g has 2 members, not a member 2"),
        (
            sampled_by(1, 5),
            "version 5 sampled a token that step 9 may train, max_staleness is 2",
        ),
    ],
)
def test_what_contradicts_the_run_is_named(changes: dict, cause: str) -> None:
    assert fault_of(dataclasses.replace(GOOD, **changes), GROUP) == cause


def tree(*lengths: int) -> Trajectory:
    """Two runs for each branch."""
    sampled = sum(lengths[1::2])
    return dataclasses.replace(
        GOOD,
        token_ids=np.zeros(sum(lengths), np.uint32),
        run_lengths=lengths,
        behavior_logprobs=np.zeros(sampled, np.float32),
        version_spans=(VersionSpan(sampled, PolicyVersion(0, 6)),),
        branches=(Branch(2),) * (len(lengths) // 2),
    )


@pytest.mark.parametrize(
    ("lengths", "changes", "cause"),
    [
        ((60, 4, 31, 1), {}, ""),
        (
            (60, 4, 64, 1),
            {},
            "branch 2 has 65 tokens, sampling.max_episode_tokens is 64",
        ),
        (
            (60, 4, 32, 1),
            {},
            "its branches have 97 tokens, sampling.max_total_tokens is 96",
        ),
        ((1, 1, 1, 1, 1, 1), {}, "it has 3 branches, sampling.max_branches is 2"),
        ((4, 4, 4, 0), {}, "branch 2 has no sampled token"),
        ((4, 4, 4, 0), {"status": Status.CANCELLED}, ""),
        (
            (64, 1),
            {"branches": ()},
            "it has 65 tokens, sampling.max_episode_tokens is 64",
        ),
    ],
)
def test_branches_have_limits_one_by_one_and_together(lengths, changes, cause):
    assert fault_of(dataclasses.replace(tree(*lengths), **changes), GROUP) == cause


def test_replies_of_all_branches_count_as_turns() -> None:
    turns = dataclasses.replace(tree(1, 1), branches=(Branch(8), Branch(2)))
    turns = dataclasses.replace(
        turns,
        token_ids=np.zeros(10, np.uint32),
        run_lengths=(1,) * 10,
        behavior_logprobs=np.zeros(5, np.float32),
        version_spans=(VersionSpan(5, PolicyVersion(0, 6)),),
        num_turns=4,
    )
    assert fault_of(turns, GROUP) == "it has 5 turns, sampling.max_turns is 4"


def test_an_evaluated_episode_may_be_of_any_version() -> None:
    group = dataclasses.replace(GROUP, purpose=Purpose.EVALUATION)
    trajectory = dataclasses.replace(
        GOOD, purpose=Purpose.EVALUATION, **sampled_by(0, 1)
    )
    assert fault_of(trajectory, group) == ""


def test_without_a_vocabulary_any_token_may_be() -> None:
    trajectory = dataclasses.replace(GOOD, token_ids=np.array([1, 10**6, 3], np.uint32))
    assert fault_of(trajectory, GROUP, vocabulary=0) == ""


def test_a_trajectory_of_a_server_that_never_had_the_group_is_none() -> None:
    group = dataclasses.replace(GROUP, allowed={0xE: range(3)})
    assert fault_of(GOOD, group) == "g was never leased to the server of epoch f"


def scored(top_k: int, largest: int) -> dict[str, object]:
    ids = np.tile(np.arange(largest, largest - top_k, -1, dtype=np.uint32), (2, 1))
    likely = np.full((2, top_k), -3.0, np.float32)
    return {"reference": ReferenceLogprobs(-np.ones(2, np.float32), ids, likely)}


@pytest.mark.parametrize(
    ("token_ids", "reference", "cause"),
    [
        ([1, 9], POLICY, ""),
        ([1, 9], None, "it has a teacher's prompt in a run without a reference model"),
        (
            [1, 10],
            POLICY,
            "token 10 of its teacher's prompt is outside the vocabulary of 10",
        ),
        ([1] * 62, POLICY, ""),
        (
            [1] * 63,
            POLICY,
            "its reference reads 65 tokens, sampling.max_episode_tokens is 64",
        ),
    ],
)
def test_a_teacher_reads_what_the_run_allows(
    token_ids: list[int], reference: ReferenceSection | None, cause: str
) -> None:
    prompt = np.array(token_ids, np.uint32)
    trajectory = dataclasses.replace(GOOD, teacher_prompt=pack_tokens(prompt))
    assert fault_of(trajectory, None, reference=reference) == cause


@pytest.mark.parametrize(
    ("changes", "top_k", "cause"),
    [
        (scored(2, 9), 2, ""),
        (scored(0, 9), 0, ""),
        ({}, 0, "it lacks the log-probabilities of its teacher's server"),
        ({"purpose": Purpose.EVALUATION}, 2, ""),
        ({"status": Status.CANCELLED}, 2, ""),
        (
            scored(2, 9),
            3,
            "it has 2 likely tokens of a reference, reference.top_k is 3",
        ),
        (
            scored(2, 9),
            None,
            "it has 2 likely tokens of a reference, reference.top_k is not set",
        ),
        (scored(2, 10), 2, "token 10 of its reference is outside the vocabulary of 10"),
    ],
)
def test_a_trajectory_has_what_the_runs_reference_says(
    changes, top_k, cause: str
) -> None:
    server = ReferenceServerSection(base_url="http://there/v1", model="m")
    reference = None if top_k is None else ReferenceSection(server=server, top_k=top_k)
    trajectory = dataclasses.replace(GOOD, **changes)
    assert fault_of(trajectory, None, reference=reference) == cause


def test_a_trajectory_has_what_its_own_environments_teacher_says() -> None:
    server = ReferenceServerSection(base_url="http://there/v1", model="m")
    served = TeacherSection(environments=(GOOD.environment,), server=server)
    itself = TeacherSection(environments=("another",), policy=True)
    reference = ReferenceSection(top_k=2, teachers={"a": served, "b": itself})
    answered = dataclasses.replace(GOOD, **scored(2, 9))
    assert fault_of(answered, None, reference=reference) == ""
    assert "it lacks" in fault_of(GOOD, None, reference=reference)
    other = {"environment": "another"}
    assert fault_of(dataclasses.replace(GOOD, **other), None, reference=reference) == ""
    fault = fault_of(dataclasses.replace(answered, **other), None, reference=reference)
    assert fault == (
        "it has 2 likely tokens of a reference, reference.top_k is not set"
    )
