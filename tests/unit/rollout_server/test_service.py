import asyncio
import contextlib
import gc
import logging
import re

import grpc
import numpy as np
import pytest
from slipstream.core import waits
from slipstream.core.errors import ConfigError
from slipstream.core.types import FailureKind, PolicyVersion, Purpose, Status
from slipstream.rollout_server import service, session
from slipstream.rollout_server.engine_interface import EngineDied
from slipstream.rollout_server.episodes import dispatcher
from slipstream.v1 import environment_pb2 as env_pb
from slipstream.v1 import fleet_pb2, trajectory_pb2, weights_pb2
from support.rigs.bad_network import BadNetwork
from support.rigs.waiting import LIMIT_S, until


@pytest.fixture
async def patient(start_server, config):
    """A server that lets what runs end when it is to leave."""
    settings = config.rollout_server.model_copy(update={"drain_timeout_s": 1000.0})
    async with start_server(
        config=config.model_copy(update={"rollout_server": settings})
    ) as found:
        yield found


@pytest.fixture
def cramped(config, monkeypatch: pytest.MonkeyPatch):
    """Settings of a server whose queue holds few trajectories, and which leaves soon."""
    for name in ("CANCEL_S", "FLUSH_S", "GOODBYE_S"):
        monkeypatch.setattr(session, name, 0.1)
    room = config.queue.model_copy(update={"max_bytes": config.trajectory_bytes() * 4})
    return config.model_copy(update={"queue": room})


def by_member(trajectories):
    return sorted(trajectories, key=lambda t: (t.member, t.attempt))


def limits_of(**changes) -> fleet_pb2.SamplingSettings:
    return fleet_pb2.SamplingSettings(
        temperature=1, top_p=1, max_reply_tokens=4, **changes
    )


def receive(connection, publish_id: str = "p", **order) -> None:
    """Orders a server to receive new weights."""
    order_told = weights_pb2.PublishOrder(publish_id=publish_id, **order)
    connection.send(receive=fleet_pb2.ReceiveWeights(order=order_told))


def answers(
    server, message: env_pb.WorkerMessage, *, to: str = "step", of: str = ""
) -> None:
    """Has the environment answer such calls so; `of` begins the keys of their episodes."""
    server.fleet.client.answer_instead = lambda command: (
        env_pb.WorkerMessage.FromString(message.SerializeToString())
        if command.HasField(to) and getattr(command, to).episode_key.startswith(of)
        else None
    )


def failure(message: str, kind: int = 0) -> env_pb.WorkerMessage:
    return env_pb.WorkerMessage(
        failure=trajectory_pb2.Failure(kind=kind, message=message)
    )


def asked(text: str) -> list[env_pb.ChatMessage]:
    return [env_pb.ChatMessage(role="user", content=text)]


async def test_a_server_says_what_its_environment_tells_nccl(
    start_server, monkeypatch
) -> None:
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    async with start_server() as server:
        connection = await server.join(step=5)
    assert connection.hello.place.nccl["NCCL_PROTO"] == "simple"
    assert "NCCL_DEBUG" not in connection.hello.place.nccl


async def test_a_leased_group_comes_back_whole(server) -> None:
    connection = await server.leased(step=5)
    trajectories = by_member(await server.fleet.wait_trajectories(4))
    report = await connection.wait_for("lease")
    assert (report.group_id, report.closed, list(report.unfinished)) == ("g1", True, [])
    assert [t.member for t in trajectories] == [0, 1, 2, 3]
    first = trajectories[0]
    assert first.run_id == "test-run"
    assert first.server_id == "server-0"
    assert first.server_epoch == connection.hello.server_epoch
    assert (first.task_index, first.seed, first.purpose) == (3, 7, Purpose.TRAINING)
    assert first.status is Status.COMPLETED
    assert first.reward == 1.0
    # The last token earned all.
    assert first.token_rewards is None
    # <s> a b <reply>, then three tokens of version 5 and the end of the sequence.
    assert first.token_ids.tolist() == [1, 4, 5, 3, 9, 9, 9, 2]
    assert first.run_lengths == (4, 4)
    assert [tuple(span) for span in first.version_spans] == [(4, PolicyVersion(0, 5))]
    assert first.prompt_text == "<s> a b <reply>"
    assert first.reply_text == "f f f"


async def test_replies_also_end_at_the_template_s_end(server) -> None:
    connection = await server.join(step=5)
    for number, stated in enumerate(([7, 30], [])):
        sampling = limits_of(max_episode_tokens=32, stop_token_ids=stated)
        connection.lease(f"g{number}", members=[0], sampling=sampling)
        await server.fleet.wait_trajectories(number + 1)
    ends = [sampling.stop_token_ids for sampling in server.engine.samplings]
    assert ends == [(7, 30), (30,)]


async def test_the_template_s_end_is_no_end_where_ends_are_ignored(server) -> None:
    await server.played(sampling=limits_of(max_episode_tokens=32, ignore_eos=True))
    (sampling,) = server.engine.samplings
    assert sampling.stop_token_ids == ()


async def test_a_reply_that_stopped_at_no_end_is_counted(server) -> None:
    connection = await server.join(step=5)
    for number, end_token in enumerate((17, 30)):
        server.engine.end_token = end_token
        connection.lease(f"g{number}", members=[0])
        trajectories = await server.fleet.wait_trajectories(number + 1)
    wrong, right = trajectories
    assert wrong.metrics["replies_without_end"] == 1.0
    assert "replies_without_end" not in right.metrics


async def test_the_hello_says_what_the_server_has_room_for(server, config) -> None:
    connection = await server.join(step=None)
    hello = connection.hello
    assert (hello.server_id, hello.max_episodes, hello.engine_workers) == (
        "server-0",
        8,
        1,
    )
    assert hello.max_model_len == 64
    assert hello.queue_bytes == config.queue.max_bytes
    assert hello.engine_settings == config.engine_settings != ""


async def test_later_turns_append_only_new_tokens(server) -> None:
    server.fleet.client.turns = 2
    (trajectory,) = await server.played()
    # The reply ends with </s>, as the template ends it: it is not repeated before "c".
    assert trajectory.token_ids.tolist() == [1, 4, 5, 3, 9, 9, 9, 2, 6, 3, 9, 9, 9, 2]
    assert trajectory.run_lengths == (4, 4, 2, 4)
    assert (trajectory.num_turns, trajectory.reward) == (2, 2.0)
    assert trajectory.metrics == {"turns": 2.0}
    assert trajectory.token_rewards.tolist() == [0, 0, 0, 1, 0, 0, 0, 1]
    assert trajectory.turn_rewards() == [1.0, 1.0]
    # People read all of it, as the model saw it.
    assert trajectory.reply_text == "f f f </s> c <reply> f f f </s>"


async def test_the_experts_of_all_turns_are_recorded_once_for_each_token(
    server,
) -> None:
    server.engine.records_experts = True
    server.fleet.client.turns = 3
    (trajectory,) = await server.played()
    routed = trajectory.routed_experts
    assert routed.num_experts == 4
    places = range(len(trajectory.token_ids) - 1)
    expected = [[[place % 4], [(place + 1) % 4]] for place in places]
    assert routed.expert_ids.tolist() == [*expected, [[255], [255]]]


async def test_experts_travel_only_where_they_may_be_trained(server) -> None:
    server.engine.records_experts = True
    connection = await server.leased(
        members=[0], purpose=trajectory_pb2.EPISODE_PURPOSE_EVALUATION
    )
    (judged,) = await server.fleet.wait_trajectories(1)
    answers(server, failure("broken"))
    connection.lease("g2", members=[0], max_attempts=1)
    _, failed = await server.fleet.wait_trajectories(2)
    assert judged.status is Status.COMPLETED
    assert judged.routed_experts is None
    assert failed.status is Status.FAILED
    assert failed.num_sampled_tokens == 4
    assert failed.routed_experts is None


async def test_a_lease_says_which_tokens_and_texts_end_a_reply(server) -> None:
    connection = await server.join()
    sampling = limits_of(max_turns=1, max_episode_tokens=32)
    sampling.stop_token_ids.extend([7, 9])
    sampling.stop.append("f f")
    connection.lease("g1", members=[0], sampling=sampling)
    await server.fleet.wait_trajectories(1)
    (given,) = server.engine.samplings
    # The last token is the end of the chat template.
    assert (given.stop_token_ids, given.stop) == ((7, 9, 30), ("f f",))


async def test_a_reply_at_its_limit_is_truncated_and_judged(server) -> None:
    server.engine.stop_after = 100
    (trajectory,) = await server.played()
    assert trajectory.status is Status.TRUNCATED
    assert trajectory.reward == 1.0
    steps = [c.step for c in server.fleet.client.calls if c.HasField("step")]
    assert [step.truncated for step in steps] == [True]


@pytest.mark.parametrize(
    ("limits", "run_lengths"),
    [
        ({"max_episode_tokens": 32}, (4, 4, 2, 4, 2, 4, 2, 4, 2, 4)),
        ({"max_turns": 100, "max_episode_tokens": 13}, (4, 4, 2, 3)),
        ({"max_turns": 1, "max_episode_tokens": 5, "max_prompt_tokens": 4}, (4, 1)),
    ],
)
async def test_an_episode_ends_where_its_context_is_full(
    server, limits, run_lengths
) -> None:
    server.fleet.client.turns = 100
    (trajectory,) = await server.played(sampling=limits_of(**limits))
    assert (trajectory.status, trajectory.run_lengths) == (
        Status.TRUNCATED,
        run_lengths,
    )
    # The environment has judged all of it.
    assert trajectory.reward == len(run_lengths) / 2


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"max_episode_tokens": 4},
            "a prompt of 4 tokens leaves no room for a reply within "
            "sampling.max_episode_tokens = 4",
        ),
        (
            {"max_episode_tokens": 32, "max_prompt_tokens": 3},
            "a prompt of 4 tokens is longer than sampling.max_prompt_tokens = 3",
        ),
    ],
)
async def test_a_prompt_that_is_too_long_fails_at_once_and_is_not_tried_again(
    server, limits, message
) -> None:
    connection = await server.join()
    sampling = limits_of(max_turns=1, **limits)
    connection.lease("g1", members=[0], sampling=sampling, max_attempts=3)
    (trajectory,) = await server.fleet.wait_trajectories(1)
    await connection.wait_for("lease")
    assert (trajectory.failure.kind, trajectory.failure.message) == (
        FailureKind.PROMPT_TOO_LONG,
        message,
    )
    assert not trajectory.will_retry
    assert len(trajectory.token_ids) == 0


@pytest.mark.parametrize("call", ["reset", "step"])
async def test_a_text_that_cannot_fit_is_not_tokenized(server, call) -> None:
    # Tokenized it would fit: this tokenizer passes over white space.
    messages = asked("c" + " " * 9_999)
    if call == "reset":
        message = env_pb.WorkerMessage(
            observation=env_pb.Observation(messages=messages)
        )
    else:
        message = env_pb.WorkerMessage(
            verdict=env_pb.Verdict(reward=0.5, messages=messages)
        )
    answers(server, message, to=call)
    (trajectory,) = await server.played()
    if call == "reset":
        assert trajectory.failure.kind is FailureKind.PROMPT_TOO_LONG
        assert trajectory.failure.message.startswith(
            "a prompt of 10000 characters leaves no room"
        )
    else:
        assert (trajectory.status, trajectory.reward) == (Status.TRUNCATED, 0.5)
        assert trajectory.run_lengths == (4, 4)


async def test_a_prompt_without_an_environment_is_scored_if_asked(server) -> None:
    sampling = limits_of(max_turns=1, max_episode_tokens=32)
    sampling.prompt_logprobs = True
    prompt = np.array([1, 4, 5, 3], "<u4").tobytes()
    (trajectory,) = await server.played(sampling=sampling, prompt_token_ids=prompt)
    assert np.frombuffer(trajectory.prompt_logprobs, "<f4").tolist() == [-3, -2, -1]
    assert trajectory.token_ids[:4].tolist() == [1, 4, 5, 3]


async def test_failed_members_run_again_and_every_attempt_is_delivered(server) -> None:

    def fail_first_attempts(command):
        if ".1.1." in command.reset.episode_key or ".1.2." in command.reset.episode_key:
            return failure("broken task")
        return None

    server.fleet.client.answer_instead = fail_first_attempts
    connection = await server.leased(members=[0, 1], first_attempt=1, max_attempts=4)
    trajectories = by_member(await server.fleet.wait_trajectories(4))
    report = await connection.wait_for("lease")
    assert report.next_attempt == 4
    assert [
        (t.member, t.attempt, t.status.name, t.will_retry) for t in trajectories
    ] == [
        (0, 1, "COMPLETED", False),
        (1, 1, "FAILED", True),
        (1, 2, "FAILED", True),
        (1, 3, "COMPLETED", False),
    ]
    assert trajectories[1].failure.kind is FailureKind.ENVIRONMENT
    assert trajectories[1].failure.message == "broken task"


async def test_a_bystander_runs_again_at_once_and_keeps_its_attempts(server) -> None:
    ends = [trajectory_pb2.FAILURE_KIND_BYSTANDER] * 2 + [
        trajectory_pb2.FAILURE_KIND_ENVIRONMENT
    ]
    remaining = list(ends)

    def lose(command):
        if command.HasField("step") and remaining:
            return failure("gone", remaining.pop(0))
        return None

    server.fleet.client.answer_instead = lose
    connection = await server.leased(members=[0], max_attempts=2)
    trajectories = by_member(await server.fleet.wait_trajectories(4))
    report = await connection.wait_for("lease")
    assert [t.failure and t.failure.kind.value for t in trajectories] == [*ends, None]
    assert [t.will_retry for t in trajectories] == [True, True, True, False]
    assert (list(report.unfinished), report.next_attempt) == ([], 4)


async def test_a_member_that_is_a_bystander_for_ever_is_given_up(server) -> None:
    answers(server, failure("gone", trajectory_pb2.FAILURE_KIND_BYSTANDER))
    connection = await server.leased(members=[0], first_attempt=5, max_attempts=6)
    trajectories = by_member(await server.fleet.wait_trajectories(5))
    await connection.wait_for("lease")
    assert [t.attempt for t in trajectories] == [5, 6, 7, 8, 9]
    assert [t.will_retry for t in trajectories] == [True] * 4 + [False]


async def test_the_last_attempt_is_not_tried_again(server) -> None:
    server.engine.fail_with = "no memory"
    connection = await server.leased(members=[0], max_attempts=2)
    trajectories = await server.fleet.wait_trajectories(2)
    await connection.wait_for("lease")
    assert [t.will_retry for t in trajectories] == [True, False]
    assert trajectories[0].failure.kind is FailureKind.ENGINE


async def test_an_unexpected_error_fails_its_episode_and_is_told_with_its_place(
    server, monkeypatch
) -> None:
    # The log shows the error as it is, and a report with a lone surrogate reaches no other process.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    server.engine.fail_with = IndexError("list index out of range \ud800")
    connection = await server.leased(members=[0, 1], max_attempts=1)
    failed = await server.fleet.wait_trajectories(2)
    await connection.wait_for("lease")
    assert {t.failure.kind for t in failed} == {FailureKind.ENVIRONMENT}
    for trajectory in failed:
        assert re.fullmatch(
            r"unexpected error of the rollout server: IndexError: list index out of range \? "
            r"\(fake_engine.py:\d+ in _sample\)",
            trajectory.failure.message,
        )
    server.engine.fail_with = None
    connection.lease("g2", members=[0])
    assert (await server.fleet.wait_trajectories(3))[-1].status is Status.COMPLETED


async def test_a_record_that_makes_no_trajectory_fails_its_episode(server) -> None:
    server.engine.records_experts = True
    server.engine.num_experts = 1 << 20
    (failed,) = await server.played(max_attempts=1)
    assert "unexpected error of the rollout server" in failed.failure.message
    assert not failed.num_sampled_tokens


async def test_a_reward_of_each_token_adds_to_that_of_the_reply(server) -> None:
    requests: list[list[int]] = []

    def answer(command: env_pb.WorkerCommand) -> env_pb.WorkerMessage | None:
        if not command.HasField("step"):
            return None
        requests.append([*command.step.token_ids])
        verdict = env_pb.Verdict(reward=1.0, token_rewards=[0.5, 0, -1, 0], done=True)
        return env_pb.WorkerMessage(verdict=verdict)

    server.fleet.client.answer_instead = answer
    (trajectory,) = await server.played()
    assert trajectory.reward == 0.5
    assert trajectory.token_rewards.tolist() == [0.5, 0, -1, 1]
    assert requests == [[9, 9, 9, 2]]


def verdict(**fields) -> env_pb.WorkerMessage:
    return env_pb.WorkerMessage(verdict=env_pb.Verdict(**fields))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            verdict(reward=float("nan"), done=True),
            "the rewards of an episode add up to nan",
        ),
        (
            verdict(reward=1e308, messages=asked("c")),
            "the rewards of an episode add up to 1e+308, which must be between -1e+06 and 1e+06",
        ),
        (
            verdict(reward=-1e6, token_rewards=[0, 0, 0, -1], done=True),
            "the rewards of an episode add up to -1e+06, which must be between",
        ),
        (
            verdict(token_rewards=[1.0] * 3, done=True),
            "token_rewards needs a number for each token of its reply: 4, got 3",
        ),
        (
            verdict(token_rewards=[0, float("nan"), 0, 0], done=True),
            "the rewards of an episode add up to nan",
        ),
        (
            env_pb.WorkerMessage(observation=env_pb.Observation()),
            "Cannot apply chat template to an empty conversation",
        ),
        (failure("out of tasks", 42), "out of tasks"),
    ],
)
async def test_what_no_environment_may_answer_fails_its_episode_alone(
    server, answer, said
):
    answers(
        server, answer, to="step" if answer.HasField("verdict") else "reset", of="g1."
    )
    connection = await server.leased(members=[0], max_attempts=1)
    (failed,) = await server.fleet.wait_trajectories(1)
    connection.lease("g2", members=[0])
    _, other = await server.fleet.wait_trajectories(2)
    assert failed.failure.kind is FailureKind.ENVIRONMENT
    assert said in failed.failure.message
    assert other.status is Status.COMPLETED


async def test_a_cancelled_lease_delivers_what_was_sampled(server) -> None:
    server.engine.limit = 2
    connection = await server.leased()
    await server.engine.wait_tokens(8)
    connection.send(cancel=fleet_pb2.CancelLease(group_id="g1", reason="test"))
    trajectories = await server.fleet.wait_trajectories(4)
    report = await connection.wait_for("lease")
    beat = await connection.wait_quiet()
    assert (list(report.unfinished), report.next_attempt) == ([0, 1, 2, 3], 1)
    assert {t.status for t in trajectories} == {Status.CANCELLED}
    assert {t.run_lengths for t in trajectories} == {(4, 2)}
    assert (beat.generated_tokens, beat.ended_tokens, beat.in_flight_tokens) == (
        8,
        8,
        0,
    )


async def test_members_that_could_not_start_before_their_lease_ended_are_unfinished(
    server,
) -> None:
    server.engine.limit = 1
    connection = await server.join()
    for number in range(3):
        connection.lease(f"g{number}")
    await connection.wait_for("heartbeat", lambda beat: beat.in_flight_tokens == 8)
    connection.send(cancel=fleet_pb2.CancelLease(group_id="g2", reason="test"))
    # The server reads its orders in turn: where it has this one, it has the one before.
    connection.lease("g3", members=[0])
    await connection.wait_for("heartbeat", lambda beat: beat.waiting_episodes == 5)
    server.engine.let_go()
    report = await connection.wait_for("lease", lambda report: report.group_id == "g2")
    trajectories = await server.fleet.wait_trajectories(9)
    assert list(report.unfinished) == [0, 1, 2, 3]
    assert {t.group_id for t in trajectories} == {"g0", "g1", "g3"}


async def test_an_episode_whose_client_was_lost_begins_again_when_that_is_back(
    start_server, monkeypatch
):
    # Longer than a busy machine needs for the next lines.
    monkeypatch.setattr(dispatcher, "RETRY_S", 5.0)
    async with start_server() as server:
        client = server.fleet.client
        server.fleet.client = None
        connection = await server.leased(members=[0], max_attempts=3)
        (trajectory,) = await server.fleet.wait_trajectories(1)
        # Time in which all attempts could fail.
        seen = (await connection.wait_for("heartbeat")).uptime_s
        await connection.wait_for("heartbeat", lambda beat: beat.uptime_s > seen + 0.3)
        server.fleet.client = client
        _, again = await server.fleet.wait_trajectories(2)
    assert (trajectory.failure.kind, trajectory.will_retry) == (
        FailureKind.INFRASTRUCTURE,
        True,
    )
    assert again.status is Status.COMPLETED


async def test_a_lease_that_is_taken_back_does_not_wait_for_a_lost_client(
    start_server,
) -> None:
    async with start_server() as server:
        server.fleet.client = None
        connection = await server.leased(members=[0], max_attempts=3)
        await server.fleet.wait_trajectories(1)
        connection.send(cancel=fleet_pb2.CancelLease(group_id="g1", reason="test"))
        report = await asyncio.wait_for(connection.wait_for("lease"), LIMIT_S)
    assert list(report.unfinished) == [0]
    assert len(server.fleet.trajectories) == 1


async def test_a_failure_while_a_lease_ends_is_to_be_tried_again_elsewhere(
    server,
) -> None:
    server.engine.limit = 2
    connection = await server.join()

    async def fail(request_id: str) -> None:
        server.engine.fail_with = "no memory"
        server.engine.let_go(2)

    server.engine.cancel = fail
    connection.lease("g1", members=[0], max_attempts=3)
    await server.engine.wait_tokens(2)
    connection.send(cancel=fleet_pb2.CancelLease(group_id="g1", reason="test"))
    report = await connection.wait_for("lease")
    (trajectory,) = await server.fleet.wait_trajectories(1)
    assert (trajectory.status, trajectory.will_retry) == (Status.FAILED, True)
    assert list(report.unfinished) == [0]


async def test_episodes_beyond_the_limit_wait(server) -> None:
    server.engine.limit = 1
    connection = await server.join()
    for number in range(3):
        connection.lease(f"g{number}")
    beat = await connection.wait_for(
        "heartbeat", lambda beat: beat.in_flight_tokens == 8
    )
    assert (beat.open_episodes, beat.waiting_episodes) == (8, 4)
    server.engine.let_go()
    await server.fleet.wait_trajectories(12)


async def test_a_publish_during_generation_stamps_both_spans(server) -> None:
    server.engine.limit = 2
    connection = await server.leased(step=5, members=[0])
    await server.engine.wait_tokens(2)
    report = await connection.serve_version(6)
    server.engine.let_go()
    (trajectory,) = await server.fleet.wait_trajectories(1)
    beat = await connection.wait_quiet()
    assert trajectory.token_ids.tolist()[4:] == [9, 9, 10, 2]
    assert [tuple(span) for span in trajectory.version_spans] == [
        (2, PolicyVersion(0, 5)),
        (2, PolicyVersion(0, 6)),
    ]
    assert report.paused_s > 0
    assert beat.paused_s == pytest.approx(report.paused_s)
    stages = report.stages
    assert (stages.receive_s, stages.load_s, stages.copied) == (0.25, 0.5, True)
    assert (stages.pause_s, stages.wire_s) == (0.0625, 0.125)
    assert 0 < stages.resume_s <= report.paused_s
    assert stages.prepare_s > 0
    # Generation went on until the weights could be received.
    assert server.engine.ran_while_prepared


async def test_an_aborted_publish_leaves_it_stale_until_the_next(server) -> None:
    connection = await server.leased(step=5, members=[0])
    server.engine.limit = 1
    receive(connection)
    await connection.publish_phase("p", fleet_pb2.PUBLISH_PHASE_LOADED)
    connection.send(abort=fleet_pb2.AbortPublish(publish_id="p", reason="test"))
    server.engine.let_go()
    # A commit that comes too late changes nothing.
    connection.send(commit=fleet_pb2.CommitPublish(publish_id="p"))
    await connection.publish_phase("p", fleet_pb2.PUBLISH_PHASE_FAILED)
    assert not server.engine.running.is_set()
    await connection.serve_version(6)
    (trajectory,) = await server.fleet.wait_trajectories(1)
    assert trajectory.status is Status.COMPLETED


async def test_a_publish_that_is_given_up_while_its_members_meet_is_left_at_once(
    server,
) -> None:
    connection = await server.join(step=5)
    server.engine.others_came.clear()
    receive(connection)
    await until(lambda: server.engine.prepared == "p")
    connection.send(
        abort=fleet_pb2.AbortPublish(publish_id="p", reason="a member was lost")
    )
    report = await connection.publish_phase("p", fleet_pb2.PUBLISH_PHASE_FAILED)
    assert report.message == "the publish was abandoned"
    server.engine.others_came.set()
    await connection.serve_version(6)
    assert server.engine.running.is_set()


async def test_an_abort_overtakes_the_publish_that_it_is_about(server) -> None:
    connection = await server.join(step=5)
    server.engine.others_came.clear()
    for number in (1, 2):
        receive(connection, f"p{number}")
    # The second one waits for the first.
    connection.send(abort=fleet_pb2.AbortPublish(publish_id="p2", reason="test"))
    connection.send(prepare=fleet_pb2.PreparePublish(publish_id="next"))
    await until(lambda: server.engine.prepared == "p1")
    await connection.wait_for("heartbeat")
    connection.send(abort=fleet_pb2.AbortPublish(publish_id="p1", reason="test"))
    await connection.publish_phase("next", fleet_pb2.PUBLISH_PHASE_READY)
    assert server.engine.prepared == "p1"


async def test_a_server_that_loses_its_controller_waits_for_no_member(server) -> None:
    connection = await server.join(step=5)
    server.engine.others_came.clear()
    receive(connection)
    await until(lambda: server.engine.prepared == "p")
    connection.hang_up()
    await server.fleet.joined()


@pytest.mark.parametrize("moment", ["prepare_error", "weights_error"])
async def test_a_failed_publish_is_reported_and_can_be_repeated(
    server, moment: str
) -> None:
    connection = await server.join(step=5)
    setattr(server.engine, moment, "a bucket did not arrive")
    receive(connection)
    report = await connection.publish_phase("p", fleet_pb2.PUBLISH_PHASE_FAILED)
    assert report.message == "a bucket did not arrive"
    assert not server.engine.running.is_set()
    setattr(server.engine, moment, None)
    await connection.serve_version(6)
    assert server.engine.running.is_set()


async def test_trajectories_wait_for_the_verdict_on_the_probe(server) -> None:
    connection = await server.join(step=5)
    server.engine.probe = server.engine.probe + 1
    report = await connection.serve_version(6, probe=weights_pb2.Probe(lengths=[1]))
    connection.lease("g1")
    beat = await connection.wait_for("heartbeat", lambda beat: beat.ended_tokens == 16)
    assert (beat.open_episodes, server.fleet.trajectories) == (0, [])
    verdict = fleet_pb2.ProbeVerdict(publish_id=report.publish_id, passed=True)
    connection.send(probe_verdict=verdict)
    trajectories = await server.fleet.wait_trajectories(4)
    assert {t.status for t in trajectories} == {Status.COMPLETED}


async def test_a_bad_verdict_cancels_what_ran_and_what_waited(server) -> None:
    server.engine.records_experts = True
    connection = await server.join(step=5)
    report = await connection.serve_version(6, probe=weights_pb2.Probe(lengths=[1]))
    connection.lease("g1")
    await connection.wait_for("heartbeat", lambda beat: beat.ended_tokens == 16)
    server.engine.limit = 1
    connection.lease("g2")
    await connection.wait_for("heartbeat", lambda beat: beat.in_flight_tokens == 4)
    verdict = fleet_pb2.ProbeVerdict(publish_id=report.publish_id, passed=False)
    connection.send(probe_verdict=verdict)
    trajectories = await server.fleet.wait_trajectories(8)
    assert {t.status for t in trajectories} == {Status.CANCELLED}
    assert not server.engine.running.is_set()


async def test_heartbeats_close_the_ledger_while_episodes_run(start_server) -> None:
    async with start_server() as server:
        server.fleet.client.turns = 3
        connection = await server.join()
        for number in range(6):
            connection.lease(f"g{number}")
        await server.fleet.wait_trajectories(24)
        beat = await connection.wait_quiet()
    beats = [m.heartbeat for m in connection.messages if m.HasField("heartbeat")]
    for report in beats:
        assert report.generated_tokens == report.in_flight_tokens + report.ended_tokens
    assert beat.ended_tokens == sum(
        t.num_sampled_tokens for t in server.fleet.trajectories
    )
    assert beat.busy_s > 0


async def test_a_server_that_is_told_to_stop_says_so_and_lets_what_runs_end(patient):
    patient.engine.limit = 2
    connection = await patient.join()
    for number in range(3):
        connection.lease(f"g{number}")
    await patient.engine.wait_tokens(16)
    patient.stop.set()
    draining = await connection.wait_for("draining")
    assert draining.reason == "it was told to stop"
    patient.engine.let_go()
    await patient.task
    reports = {
        m.lease.group_id: m.lease for m in connection.messages if m.HasField("lease")
    }
    # Eight episodes ran; the third group had not begun.
    assert {t.status for t in patient.fleet.trajectories} == {Status.COMPLETED}
    assert {t.group_id for t in patient.fleet.trajectories} == {"g0", "g1"}
    unfinished = {name: list(report.unfinished) for name, report in reports.items()}
    assert unfinished == {"g0": [], "g1": [], "g2": [0, 1, 2, 3]}
    assert connection.messages[-1].HasField("drained")


async def test_a_failed_attempt_on_a_server_that_drains_is_tried_again_elsewhere(
    patient,
) -> None:
    patient.engine.limit = 2
    connection = await patient.leased(members=[0])
    await patient.engine.wait_tokens(2)
    connection.send(drain=fleet_pb2.Drain(reason="test", finish=True))
    assert (await connection.wait_for("draining")).reason == "test"
    patient.engine.fail_with = "no memory"
    patient.engine.let_go()
    await patient.task
    report = await connection.wait_for("lease")
    (trajectory,) = patient.fleet.trajectories
    assert (trajectory.status, trajectory.will_retry) == (Status.FAILED, True)
    assert list(report.unfinished) == [0]


async def test_the_controller_can_drain_a_server_at_once(patient) -> None:
    patient.engine.limit = 2
    connection = await patient.leased()
    await patient.engine.wait_tokens(8)
    connection.send(drain=fleet_pb2.Drain(reason="leave", finish=True))
    await connection.wait_for("draining")
    connection.send(drain=fleet_pb2.Drain(reason="the run is over"))
    await asyncio.wait_for(patient.task, LIMIT_S)
    await connection.wait_for("drained")
    assert {t.status for t in patient.fleet.trajectories} == {Status.CANCELLED}


@pytest.mark.parametrize("run_stopped", [False, True])
async def test_a_server_tells_whether_the_run_that_it_left_may_go_on(
    patient, run_stopped
) -> None:
    connection = await patient.join()
    connection.send(
        drain=fleet_pb2.Drain(reason="the run is over", run_stopped=run_stopped)
    )
    assert await asyncio.wait_for(patient.task, LIMIT_S) == run_stopped


async def test_a_server_that_was_stopped_itself_does_not_wait_for_the_run(
    patient,
) -> None:
    patient.engine.limit = 2
    connection = await patient.leased()
    await patient.engine.wait_tokens(8)
    patient.stop.set()
    await connection.wait_for("draining")
    connection.send(drain=fleet_pb2.Drain(reason="the run is over", run_stopped=True))
    assert await asyncio.wait_for(patient.task, LIMIT_S) is False


async def test_a_server_that_drains_still_receives_what_others_wait_for(patient):
    patient.engine.limit = 2
    connection = await patient.leased(step=5)
    await patient.engine.wait_tokens(8)
    patient.stop.set()
    await connection.wait_for("draining")
    receive(connection)
    await connection.publish_phase("p", fleet_pb2.PUBLISH_PHASE_LOADED)
    connection.send(drain=fleet_pb2.Drain(reason="the run is over"))
    await patient.task


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_server_leaves_though_the_controller_takes_nothing_any_more(
    start_server, cramped, is_lost
) -> None:
    async with start_server(config=cramped) as server:
        server.fleet.acknowledging = False
        connection = await server.join()
        for number in range(32):
            connection.lease(f"g{number}")
        # Sampled tokens of more trajectories than there is room for.
        await connection.wait_for(
            "heartbeat", lambda beat: beat.ended_tokens == 4 * 4 * 32
        )
        if is_lost:
            connection.hang_up()
            await server.fleet.joined()
        server.stop.set()
        await asyncio.wait_for(server.task, LIMIT_S)
    assert 0 < len({t.trajectory_id for t in server.fleet.trajectories}) < 4 * 32


async def test_a_lost_stream_ends_what_runs_and_joins_in_a_new_epoch(server) -> None:
    server.engine.limit = 2
    first = await server.join(step=5)
    first.lease("g1")
    await server.engine.wait_tokens(8)
    first.hang_up()
    second = await server.fleet.joined()
    assert second.hello.server_epoch != first.hello.server_epoch
    assert {t.status for t in server.fleet.trajectories} == {Status.CANCELLED}
    assert not server.engine.running.is_set()
    server.engine.let_go()
    await second.serve_version(6)
    second.lease("g2", members=[0])
    trajectories = await server.fleet.wait_trajectories(5)
    beat = await second.wait_quiet()
    assert trajectories[-1].server_epoch == second.hello.server_epoch
    assert (beat.generated_tokens, beat.ended_tokens) == (4, 4)


def waiting_streams() -> int:
    """The number of tasks of gRPC that wait for the next message on a stream, ended or not."""
    return sum(
        "_consume_request_iterator" in repr(task) for task in asyncio.all_tasks()
    )


async def test_nothing_waits_on_a_stream_that_is_over(server) -> None:
    client = server.fleet.client
    # The collector would find such a task some time, and the log would tell of it.
    gc.disable()
    try:
        for number in range(8):
            connection = await server.join()
            server.fleet.client = None if number % 2 else client
            connection.lease(f"g{number}", members=[0], max_attempts=1)
            await server.fleet.wait_trajectories(number + 1)
            connection.hang_up()
        await server.join()
        # Tasks of the newest session, and of the calls to clients.
        assert waiting_streams() <= 2
    finally:
        gc.enable()
    failed = [t.failure is not None for t in server.fleet.trajectories]
    assert failed == [False, True] * 4


def open_channels() -> dict[int, grpc.aio.Channel]:
    """The channels of gRPC that are not closed, by their addresses in memory."""
    channels = [
        thing for thing in gc.get_objects() if issubclass(type(thing), grpc.aio.Channel)
    ]
    is_over = grpc.ChannelConnectivity.SHUTDOWN
    return {
        id(channel): channel
        for channel in channels
        if channel.get_state() is not is_over
    }


async def test_a_server_that_has_left_has_closed_its_channel(start_server) -> None:
    earlier = open_channels()
    async with start_server() as server:
        await server.join()
        channels = [
            channel
            for place, channel in open_channels().items()
            if place not in earlier
        ]
        assert channels
    assert all(
        channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in channels
    )


async def test_what_runs_may_end_while_the_controller_is_away(start_server) -> None:
    async with start_server(heartbeat_timeout_s=10.0) as server:
        server.engine.limit = 2
        connection = await server.leased()
        await server.engine.wait_tokens(8)
        connection.hang_up()
        await connection.ended.wait()
        server.engine.let_go()
        await server.fleet.joined()
        trajectories = await server.fleet.wait_trajectories(4)
    assert {t.status for t in trajectories} == {Status.COMPLETED}


async def test_a_server_that_joins_again_tells_what_it_has_finished_and_not_delivered(
    start_server, cramped
) -> None:
    async with start_server(config=cramped) as server:
        server.fleet.acknowledging = False
        connection = await server.join()
        assert not connection.hello.undelivered
        for number in range(8):
            connection.lease(f"g{number}")
        await connection.wait_for(
            "heartbeat", lambda beat: beat.ended_tokens == 4 * 4 * 8
        )
        connection.hang_up()
        again = await server.fleet.joined()
    # Trajectories for which there is no room are among them.
    group_ids = {name.rsplit(".", 2)[0] for name in again.hello.undelivered}
    assert group_ids == {
        f"g{number}.{member}" for number in range(8) for member in range(4)
    }


async def test_the_death_of_the_engine_ends_the_server_with_its_cause(server) -> None:
    await server.join()
    server.engine.died.set()
    with pytest.raises(ExceptionGroup) as caught:
        await server.task
    assert caught.group_contains(EngineDied, match="told to die")


async def test_no_count_lacks_the_episodes_that_end_with_their_engine(server) -> None:
    """They give no trajectory, and heartbeats go on while the last of them ends."""
    generate = server.engine.generate
    dead = asyncio.Event()
    released = asyncio.Event()

    async def die(*args, **kwargs):
        sampling = asyncio.ensure_future(generate(*args, **kwargs))
        try:
            await dead.wait()
            sampling.cancel()
            await asyncio.wait((sampling,))
            raise EngineDied("it is gone")
        finally:
            if not args[0].startswith("g1.0."):
                # The group cancels it once.
                with contextlib.suppress(asyncio.CancelledError):
                    await released.wait()
                await released.wait()

    server.engine.generate = die
    server.engine.limit = 2
    connection = await server.leased()
    await server.engine.wait_tokens(8)
    # A heartbeat of before may be on its way still.
    await connection.wait_for("heartbeat", lambda beat: beat.generated_tokens == 8)
    dead.set()
    await until(lambda: server.engine.use().open_requests == 0)
    before = len(connection.messages)
    await until(lambda: len(connection.messages) > before + 3)
    released.set()
    for beat in (
        m.heartbeat for m in connection.messages[before:] if m.HasField("heartbeat")
    ):
        assert (beat.ended_episodes, beat.sent.trajectories) == (0, 0)
        assert (beat.generated_tokens, beat.in_flight_tokens) == (8, 8)
    with pytest.raises(ExceptionGroup):
        await server.task


async def test_a_refusal_is_final_and_names_who_refuses(server) -> None:
    server.fleet.refusal = "the run has slipstream-rl 2.0, the caller 1.0"
    message = f"{server.fleet.address} refuses this server: .* the caller 1.0"
    with pytest.raises(ConfigError, match=message):
        await server.task


async def test_a_controller_that_does_not_answer_is_told_with_its_address(
    start_server, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(service, "_WELCOME_LIMIT_S", 1.0)
    async with BadNetwork("127.0.0.1:9") as network:
        # The server speaks HTTP/2, and answers no call.
        network.page = bytes.fromhex("000000040000000000")
        async with start_server(at=network.address) as server:
            message = (
                f"no welcome from the controller at {network.address} yet: no answer "
                f"within 1 s"
            )
            await until(lambda: message in caplog.text)
            network.target = server.fleet.address
            network.page = None
            network.reset()
            await server.join()


@pytest.mark.parametrize("known", [set(), None])
async def test_a_stream_that_leads_to_no_controller_is_left(
    start_server, caplog, monkeypatch, known
) -> None:
    """A proxy keeps the stream of a controller that is gone: another one answers, or nobody."""
    monkeypatch.setattr(waits, "SILENT_S", 0.2)
    async with start_server() as server:
        await server.join()
        await until(lambda: server.fleet.asked > 1)
        assert server.fleet.connections.empty()
        server.fleet.known = known
        if known is None:
            monkeypatch.setattr(service, "_ASK_LIMIT_S", 0.2)
        await until(lambda: "the controller's stream broke" in caplog.text)
        server.fleet.known = set()
        monkeypatch.setattr(service, "_ASK_LIMIT_S", LIMIT_S)
        connection = await server.join()
        await connection.wait_for("heartbeat")
