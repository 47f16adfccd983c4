"""Trajectories of every shape, for hypothesis."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.types import (
    Branch,
    Failure,
    FailureKind,
    GroupId,
    ImagePlace,
    PolicyVersion,
    Purpose,
    ReferenceLogprobs,
    RoutedExperts,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
    expert_dtype,
)
from slipstream.learner.controller.leasing.groups import Group
from slipstream.protocol.codec import merge_spans, pack_logprobs, pack_tokens

from support.fakes.plain_trajectory import plain_trajectory

# A whole one, with tokens of two versions.
GOOD = plain_trajectory(
    token_ids=[1, 9, 3],
    run_lengths=(1, 2),
    logprobs=[-0.5, 5e-4],
    run_id="r",
    group_id=GroupId("g"),
    member=1,
    attempt=0,
    server_id=ServerId("a"),
    server_epoch=0xF,
    environment="e",
    task_index=3,
    seed=4,
    purpose=Purpose.TRAINING,
    status=Status.COMPLETED,
    version_spans=(
        VersionSpan(1, PolicyVersion(0, 6)),
        VersionSpan(1, PolicyVersion(1, 7)),
    ),
)


def plain_group(**changes: Any) -> Group:
    """A group of two members of the same task that no server holds, with these `changes`."""
    plain: dict[str, Any] = {
        "group_id": GOOD.group_id,
        "environment": GOOD.environment,
        "task_index": GOOD.task_index,
        "seed": GOOD.seed,
        "purpose": GOOD.purpose,
        "size": 2,
        "deadline_step": 3,
        "holder": None,
    }
    return Group(**plain | changes)


texts = st.text(st.characters(codec="utf-8"), max_size=20)
names = st.text("abcXYZ0189._:-", max_size=20)
printed = st.characters(
    codec="utf-8",
    exclude_categories=("Cc", "Zl", "Zp"),
)
lines = st.text(printed, max_size=20)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
steps = st.integers(0, 2**31 - 1)
seconds = st.floats(0, 1e9)
versions = st.builds(PolicyVersion, steps, steps)


@st.composite
def routed_experts(draw: st.DrawFn, num_tokens: int) -> RoutedExperts:
    """Draws the experts of `num_tokens` tokens; at some positions none are recorded."""
    num_experts = draw(st.sampled_from([1, 4, 255, 256, 300, 65535]))
    top_k = draw(st.integers(1, min(3, num_experts)))
    shape = (num_tokens, draw(st.integers(1, 3)), top_k)
    missing = np.iinfo(expert_dtype(num_experts)).max
    random = np.random.default_rng(draw(st.integers(0, 99)))
    ids = random.integers(0, num_experts, shape)
    ids[random.random(shape) < 0.2] = missing
    return RoutedExperts(ids.astype(expert_dtype(num_experts)), num_experts)


@st.composite
def references(draw: st.DrawFn, num_sampled: int) -> ReferenceLogprobs:
    top_k = draw(st.integers(0, 3))
    seed = draw(st.integers(0, 99))
    random = np.random.default_rng(seed)
    first_ids = random.integers(0, 2**31, (num_sampled, 1))
    ids = first_ids + np.arange(top_k)
    weights = np.ones(top_k + 1)
    shares = random.dirichlet(weights, num_sampled)[:, :top_k]
    return ReferenceLogprobs(
        -random.random(num_sampled).astype(np.float32),
        ids.astype(np.uint32),
        np.log(shares).astype(np.float32),
    )


def numbers(
    num_numbers: int, element: st.SearchStrategy[Any], dtype: npt.DTypeLike
) -> st.SearchStrategy[np.ndarray]:
    drawn = st.lists(element, min_size=num_numbers, max_size=num_numbers)
    return drawn.map(lambda elements: np.array(elements, dtype))


def earned(num_sampled: int) -> st.SearchStrategy[np.ndarray]:
    return numbers(num_sampled, st.floats(-1e6, 1e6, width=32), np.float32)


@st.composite
def branches(draw: st.DrawFn, num_runs: int) -> tuple[Branch, ...]:
    """Draws the branches of a trajectory of `num_runs` runs; none where the number is odd."""
    if num_runs % 2 or not draw(st.booleans()):
        return ()
    drawn = []
    rewards: dict[str, float | None] = {}
    while num_runs:
        length = 2 * draw(st.integers(1, num_runs // 2))
        name = draw(names)
        if name not in rewards:
            rewards[name] = draw(st.none() | st.floats(-1e6, 1e6))
        share = draw(st.floats(-1e6, 1e6))
        drawn.append(
            Branch(
                num_runs=length,
                share=share,
                name=name,
                reward=rewards[name],
            )
        )
        num_runs -= length
    return tuple(drawn)


@st.composite
def spans(draw: st.DrawFn, num_sampled: int) -> tuple[VersionSpan, ...]:
    drawn = []
    while num_sampled:
        length = draw(st.integers(1, num_sampled))
        drawn.append(VersionSpan(length, draw(versions)))
        num_sampled -= length
    return merge_spans(drawn)


@st.composite
def image_places(
    draw: st.DrawFn, num_images: int, num_tokens: int
) -> tuple[ImagePlace, ...]:
    """Draws places of some of the images, in the order of the tokens."""
    if not num_images or not num_tokens:
        return ()
    offsets = draw(st.sets(st.integers(0, num_tokens - 1), max_size=4))
    image = st.integers(0, num_images - 1)
    return tuple(ImagePlace(offset, draw(image)) for offset in sorted(offsets))


@st.composite
def prompt_logprobs(draw: st.DrawFn, run_lengths: tuple[int, ...]) -> bytes:
    """Draws those of a first run of two tokens or more, or none."""
    num_scored = max(sum(run_lengths[:1]) - 1, 0)
    if not draw(st.booleans()):
        return b""
    return pack_logprobs(draw(earned(num_scored)))


teacher_prompts = st.lists(uint32, max_size=5).map(
    lambda token_ids: pack_tokens(np.array(token_ids, np.uint32))
)


@st.composite
def kept_tokens(draw: st.DrawFn, sampled_ids: list[int]) -> bytes:
    """Draws sets that have the sampled tokens; some tokens were drawn from all."""
    sets = []
    for token in sampled_ids:
        likely_ids = draw(st.sets(uint32, max_size=3))
        sets.append(sorted(likely_ids | {token}) if draw(st.booleans()) else [])
    return KeptTokens.of_sets(sets).packed()


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Draws every field of a trajectory, of parts that fit together."""
    run_lengths = tuple(draw(st.lists(st.integers(0, 12), max_size=7)))
    num_sampled = sum(run_lengths[1::2])
    num_tokens = sum(run_lengths)
    status = draw(st.sampled_from(Status))
    failures = st.builds(Failure, st.sampled_from(FailureKind), texts)
    image_bytes = st.binary(min_size=1, max_size=20)
    images = draw(st.lists(image_bytes, max_size=3))
    metrics = st.dictionaries(lines, st.floats(-1e18, 1e18), max_size=3)
    short_names = names.filter(lambda name: len(name) <= 64)
    token_ids = draw(
        numbers(
            num_tokens,
            uint32,
            np.uint32,
        )
    )
    branches_of_runs = draw(branches(len(run_lengths)))
    is_sampled = np.repeat(np.arange(len(run_lengths)) % 2 == 1, run_lengths)
    sampled_ids = token_ids[is_sampled].tolist()
    return Trajectory(
        run_id=draw(names),
        group_id=GroupId(draw(names)),
        member=draw(st.integers(0, 65535)),
        attempt=draw(st.integers(0, 1_000_000)),
        server_id=ServerId(draw(names)),
        server_epoch=draw(uint64),
        environment=draw(lines),
        task_index=draw(uint64),
        seed=draw(uint64),
        purpose=draw(st.sampled_from(Purpose)),
        status=status,
        failure=draw(failures) if status is Status.FAILED else None,
        will_retry=draw(st.booleans()),
        token_ids=token_ids,
        run_lengths=run_lengths,
        behavior_logprobs=draw(
            numbers(
                num_sampled,
                st.floats(-1e3, 0, width=32),
                np.float32,
            )
        ),
        version_spans=draw(spans(num_sampled)),
        reward=draw(st.floats(-1e6, 1e6)),
        judged_lease=draw(
            st.integers(
                0,
                1_000_001,
            )
        ),
        token_rewards=draw(st.none() | earned(num_sampled)) if num_sampled else None,
        metrics=draw(metrics),
        num_turns=draw(st.integers(0, 65536)),
        generation_s=draw(seconds),
        environment_s=draw(seconds),
        prompt_text=draw(texts),
        reply_text=draw(texts),
        routed_experts=draw(st.none() | routed_experts(num_tokens)),
        branches=branches_of_runs,
        is_given=draw(st.booleans()),
        reference=draw(st.none() | references(num_sampled)),
        images=tuple(images),
        image_places=draw(image_places(len(images), num_tokens)),
        adapter=draw(st.just("") | short_names),
        max_reply_tokens=draw(st.integers(0, 4194304)),
        expected_answer=draw(texts),
        prompt_logprobs=draw(prompt_logprobs(run_lengths)),
        kept_tokens=draw(kept_tokens(sampled_ids)),
        teacher_prompt=b"" if branches_of_runs else draw(teacher_prompts),
    )


def make_trajectory(
    num_context: int, num_sampled: int, num_versions: int = 1
) -> Trajectory:
    """An ordinary one, with names of the usual length."""
    generator = np.random.default_rng(1)
    cut = np.linspace(0, num_sampled, num_versions + 1).astype(int)
    return plain_trajectory(
        generator.integers(0, 150_000, num_context + num_sampled),
        (num_context, num_sampled),
        -generator.random(num_sampled),
        run_id="quickstart-7f3a9c21",
        group_id=GroupId("g000123"),
        member=3,
        server_id=ServerId("server-0"),
        server_epoch=0x1234567890ABCDEF,
        environment="echo",
        task_index=12345,
        seed=0x1234567890ABCDEF,
        version_spans=tuple(
            VersionSpan(int(b - a), PolicyVersion(0, 100 + i))
            for i, (a, b) in enumerate(zip(cut, cut[1:], strict=False))
        ),
        reward=1.0,
        metrics={"right": 1.0},
        num_turns=1,
        generation_s=1.5,
        environment_s=0.1,
    )
