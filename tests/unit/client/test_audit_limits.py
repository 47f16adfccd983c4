"""The audit goes by the limits of a run: what a run refuses, cuts, or plays one after another."""

import itertools
from collections.abc import Sequence

import pytest
from slipstream.client import AgentEnvironment, Environment, ResetResult, StepResult
from slipstream.client.audit import Audit
from slipstream.client.audit_plays import EpisodeLimits
from slipstream.client.audit_report import AuditFinding, findings
from slipstream.client.episode_host import EpisodeHost
from slipstream.v1 import environment_pb2 as pb

IMAGE = {"type": "image", "data": b"\x89PNG"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def user(content: object) -> list[dict]:
    return [{"role": "user", "content": content}]


class Sums(Environment):
    """Judges the last of `turns` replies; others are followed by `between`."""

    turns = 1
    between = StepResult(done=False, messages=user("and?"))
    metrics: dict[str, float] = {}

    def tasks(self) -> Sequence[int]:
        return range(4)

    def reset(self, task: int):
        self.number = 0
        self.expected_answer = str(task)
        return user(f"Say {task}.")

    def step(self, reply: str) -> StepResult:
        self.number += 1
        if self.number < self.turns:
            return self.between
        return StepResult(float(reply == self.expected_answer), metrics=self.metrics)


class ByTokens(Sums):
    def step(self, reply):
        size = len(reply.token_ids)
        return StepResult(
            token_rewards=[float(reply == self.expected_answer) / size] * size
        )


class ByWords(Sums):
    def step(self, reply):
        return StepResult(float(reply == self.expected_answer), token_rewards=[0.1])


class LateTools(Sums):
    turns = 2
    between = StepResult(done=False, messages=user("and?"), tools=[TOOL])


class LateImages(Sums):
    turns = 2
    between = StepResult(done=False, messages=user([IMAGE]))


class StrangeCalls(Sums):
    turns = 2
    between = StepResult(
        done=False,
        messages=[{"role": "tool", "content": "4", "tool_call_id": "call_1"}],
    )


class HalfGiven(Sums):
    turns = 2

    def reset(self, task):
        return ResetResult(super().reset(task), reply="4")


class Turns(Sums):
    turns = 4


class Metrics(Sums):
    metrics = {f"m{number}": 1.0 for number in range(20)}


class LongNames(Sums):
    metrics = {f"{'x' * 40}{number}": 1.0 for number in range(2)}


class LongReplies(Sums):
    max_reply_tokens = 99


class LongAnswers(Sums):
    def reset(self, task):
        opening = super().reset(task)
        self.right_reply = self.expected_answer
        self.expected_answer = "x" * 5000
        return opening

    def step(self, reply):
        return StepResult(float(reply == self.right_reply))


class Unequal(Sums):
    numbers = itertools.count()

    def reset(self, task):
        return [*super().reset(task), *user(str(next(self.numbers)))]


class Place:
    """The one place of a simulator."""

    def __init__(self) -> None:
        self.is_taken = False

    def take(self) -> None:
        if self.is_taken:
            raise ConnectionError("no place is free")
        self.is_taken = True


class Single(Sums):
    has_place = False

    def __init__(self) -> None:
        self.place = Place()

    async def reset(self, task):
        self.place.take()
        self.has_place = True
        return super().reset(task)

    def close(self):
        self.place.is_taken = self.place.is_taken and not self.has_place


class SingleAgent(AgentEnvironment):
    def __init__(self) -> None:
        self.place = Place()

    def tasks(self):
        return [1]

    async def run(self, task, endpoint):
        import httpx

        self.place.take()
        async with httpx.AsyncClient(headers={"x-api-key": endpoint.api_key}) as client:
            body = {"model": "m", "messages": user("go")}
            headers = {"authorization": f"Bearer {endpoint.api_key}"}
            await client.post(
                f"{endpoint.base_url}/chat/completions", json=body, headers=headers
            )
        return 1.0


async def audited(
    environment: Environment, limits: EpisodeLimits
) -> list[AuditFinding]:
    host = EpisodeHost(environment)

    async def ask(**command: object) -> pb.WorkerMessage:
        return await host.answer(pb.WorkerCommand(**command))

    loaded = pb.Loaded(num_tasks=host.num_tasks, digest=host.digest())
    audit = Audit(host, ask, loaded=loaded, limit_s=600.0, limits=limits)
    try:
        return findings(await audit.run())
    finally:
        await host.close_all()


RUN = EpisodeLimits(has_tools=False, max_images=0, max_turns=3, max_reply_tokens=16)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (
            ByWords,
            "token_rewards needs a number for each token of its reply: 2, got 1 (in ",
        ),
        (LateTools, "tools need rollout_server.tool_parser, the reader"),
        (LateImages, "it shows 1 image, more than sampling.max_images = 0 (in "),
        (
            StrangeCalls,
            "tool_call_id must be the id of a call of the model, got 'call_1' (in ",
        ),
        (HalfGiven, "an environment gives all replies of an episode, or none (in "),
    ],
)
async def test_what_a_run_refuses_in_every_episode_is_refused(
    environment, says: str
) -> None:
    refused = [
        finding.text
        for finding in await audited(environment(), RUN)
        if finding.is_refused
    ]
    assert [text[: len(says)] for text in refused] == [says]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (
            Turns,
            "the right answer goes on in task 0 after 3 turns, where a run ends the episode",
        ),
        (
            Metrics,
            "of 20 metrics of an episode a run leaves out 4: 16 are kept, each by the",
        ),
        (
            LongNames,
            "of 2 metrics of an episode a run leaves out 1: 16 are kept, each by the",
        ),
        (
            LongReplies,
            "max_reply_tokens = 99 of task 0 is more than a run allows, whose replies",
        ),
        (
            LongAnswers,
            "expected_answer is longer than 4096 bytes in 4 of 4 tasks, such as task 0",
        ),
    ],
)
async def test_what_a_run_cuts_or_leaves_out_is_told(environment, says: str) -> None:
    findings = [
        finding
        for finding in await audited(environment(), RUN)
        if finding.text.startswith(says)
    ]
    assert [finding.is_refused for finding in findings] == [False]


@pytest.mark.parametrize("environment", [Sums, ByTokens])
async def test_what_a_run_takes_as_it_is_is_not_refused(environment) -> None:
    texts = [finding.text for finding in await audited(environment(), RUN)]
    assert not [
        text for text in texts if "token" in text or "run" in text or "fail" in text
    ], texts


@pytest.mark.parametrize("environment", [Single, SingleAgent])
async def test_a_single_place_is_enough_where_one_episode_is_played_at_a_time(
    environment,
) -> None:
    for at_once, is_told in ((8, True), (1, False)):
        findings = await audited(
            environment(), EpisodeLimits(at_once=at_once, in_all=at_once)
        )
        assert (
            any("no place is free" in finding.text for finding in findings) == is_told
        ), findings


async def test_a_single_place_is_told_where_workers_play_one_episode_each() -> None:
    # The place may be one of each worker, or one for all of them.
    (finding,) = await audited(SingleAgent(), EpisodeLimits(at_once=1, in_all=4))
    assert ("no place is free" in finding.text, finding.is_refused) == (True, False)


async def test_prompts_that_differ_are_refused_where_their_rewards_are_compared() -> (
    None
):
    for compares in (True, False):
        findings = [
            finding
            for finding in await audited(Unequal(), EpisodeLimits(compares=compares))
            if "begin otherwise when they are reset twice" in finding.text
        ]
        assert [finding.is_refused for finding in findings] == [compares]
