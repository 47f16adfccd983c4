"""Everything of ours that reads bytes of others, to be fuzzed: decoders and readers of files.

A reader raises the errors that it names, in one line, and nothing else; it takes no long time.
"""

import asyncio
import dataclasses
import io
import os
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message
from PIL import Image
from slipstream.client.environment import Environment, StepResult
from slipstream.client.episode_host import EpisodeHost
from slipstream.client.status import environment_from_pb, event_from_pb, run_from_pb
from slipstream.core.errors import ConfigError, EnvironmentFailed, ProtocolError
from slipstream.core.models.images import FORMATS, decoded
from slipstream.core.settings.sections import SamplingSection
from slipstream.core.types import (
    ReferenceLogprobs,
    ServerId,
    Trajectory,
    TrajectoryId,
    TrajectoryName,
)
from slipstream.learner.controller.reporting.metrics import readable
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.inspection import read_claim
from slipstream.learner.trainer.batches.batch import Batch, read_order
from slipstream.protocol.bounds import check_bounds, decode
from slipstream.protocol.codec import (
    decode_trajectory,
    encode_trajectory,
    trajectory_from_pb,
    unpack_logprobs,
    unpack_tokens,
)
from slipstream.protocol.queue.base import Delivery, opener
from slipstream.protocol.running_calls import RunningCalls
from slipstream.protocol.weights.buckets import layout_from_pb
from slipstream.rollout_server.episodes.calls import CallTable, StreamSession
from slipstream.rollout_server.episodes.play import EpisodeLease
from slipstream.v1 import (
    environment_pb2,
    fleet_pb2,
    status_pb2,
    trainer_pb2,
    trajectory_pb2,
    weights_pb2,
)

from support.fakes.fake_server import LAYOUT
from support.rigs.fuzz_calls import METHODS, WORDS, honest_trajectory, honest_tree
from support.rigs.fuzz_honest import HONEST, REPORT, SPEC, VERSION
from support.rigs.fuzzing import bounded, mutated, nearly, wild

# The lines of Python that one reading may run at most.
MOST_LINES = 2_000_000


@dataclass(frozen=True)
class Reader:
    """What reads, what it reads honestly, and the errors that it may raise."""

    name: str
    honest: tuple[bytes, ...]
    read: Callable[[bytes, Path], object]
    errors: tuple[type[Exception], ...] = ()
    # Makes other bytes than damaged ones.
    make: Callable[[bytes, random.Random], bytes] = mutated


def sample(reader: Reader, draw: random.Random) -> bytes:
    """Bytes for a reader: damaged, made up, or honest."""
    way = draw.random()
    if way < 0.01:
        return b"[" * 100_000
    if way < 0.05:
        return draw.randbytes(draw.choice((0, 1, 10, 1000)))
    honest = draw.choice(reader.honest)
    if way < 0.1:
        return honest
    return mutated(honest, draw) if way < 0.4 else reader.make(honest, draw)


def message_reader(
    name: str,
    honest: Message,
    use: Callable[[Message], object],
    errors: tuple[type[Exception], ...] = (ProtocolError,),
) -> Reader:
    """Reads messages that are checked for their bounds, then uses them."""
    kind = type(honest)

    def make(data: bytes, draw: random.Random) -> bytes:
        way = draw.random()
        if way < 0.2:
            return wild(kind.DESCRIPTOR, draw).SerializePartialToString()
        made = bounded(kind.DESCRIPTOR, draw, WORDS)
        if way > 0.5:
            made = nearly(kind.FromString(honest.SerializeToString()), draw, WORDS)
        return made.SerializePartialToString()

    def read(data: bytes, folder: Path) -> object:
        try:
            message = kind.FromString(data)
        except DecodeError:
            return None
        return use(message)

    return Reader(name, (honest.SerializeToString(),), read, errors, make)


def request_readers() -> list[Reader]:
    """The check of every request that the controller takes."""
    records = []
    for name, messages in HONEST.items():
        kind = message_factory.GetMessageClass(METHODS[name].input_type)
        reader = message_reader(name, messages[0], lambda message: None)
        honest = tuple(message.SerializeToString() for message in messages)
        read = _decoding(kind)
        records.append(
            Reader(f"request {name}", honest, read, (ProtocolError,), reader.make)
        )
    return records


def _decoding(kind: type[Message]) -> Callable[[bytes, Path], object]:
    return lambda data, folder: decode(kind, data)


def _trajectory(honest: bytes, draw: random.Random) -> bytes:
    """A changed trajectory whose checksum is right as often as not."""
    message = trajectory_pb2.Trajectory.FromString(honest)
    changed = nearly(message, draw, WORDS)
    assert isinstance(changed, trajectory_pb2.Trajectory)
    if draw.random() < 0.6:
        reference = changed.reference
        arrays = (
            changed.token_ids,
            changed.behavior_logprobs,
            changed.routed_experts.expert_ids,
        )
        likely = (reference.logprobs, reference.top_ids, reference.top_logprobs)
        changed.checksum = zlib.crc32(b"".join(arrays + likely))
    return changed.SerializePartialToString()


def _with_reference(trajectory: trajectory_pb2.Trajectory) -> bytes:
    """The trajectory with two likely tokens of a reference at each sampled token."""
    changed = trajectory_pb2.Trajectory()
    changed.CopyFrom(trajectory)
    number = len(changed.behavior_logprobs) // 4
    reference = ReferenceLogprobs(
        np.full(number, -2, np.float32),
        np.tile(np.array([1, 2], np.uint32), (number, 1)),
        np.full((number, 2), -2, np.float32),
    )
    known = dataclasses.replace(trajectory_from_pb(changed), reference=reference)
    return encode_trajectory(known)


def _told(trajectory: Trajectory) -> object:
    """What is said of a trajectory in trajectories.jsonl; its sequences have all its tokens."""
    parts = trajectory.sequences
    assert sum(part.tokens.stop - part.tokens.start for part in parts) == len(
        trajectory.token_ids
    )
    assert parts[-1].sampled.stop == len(trajectory.behavior_logprobs)
    # A run takes no more.
    return readable(1, trajectory, None) if len(parts) <= 256 else None


def _claim(data: bytes, folder: Path) -> object:
    name = TrajectoryId(data[:40].decode(errors="replace"))
    server_epochs = ServerEpochs()
    server_epochs.join(ServerKey(ServerId("fake"), 7))
    opener(b"k" * 32)(name, data)
    TrajectoryName.parse(name)
    return read_claim(Delivery(name, data), server_epochs, largest_bytes=1 << 20)


def _call_record(data: bytes, folder: Path) -> object:
    path = folder / "record"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return RunningCalls.read(descriptor)
    finally:
        os.close(descriptor)


def _images() -> tuple[bytes, ...]:
    """An image in each format that is read, and one that moves."""
    image = Image.frombytes("RGB", (40, 30), random.Random(1).randbytes(3600))
    files = {kind: io.BytesIO() for kind in FORMATS}
    for kind, file in files.items():
        image.save(file, kind)
    moving = io.BytesIO()
    image.save(
        moving, "GIF", save_all=True, append_images=[image.rotate(90, expand=True)]
    )
    return tuple(file.getvalue() for file in (*files.values(), moving))


def message_readers() -> list[Reader]:
    """Decoders of messages, on every side."""
    spec = environment_pb2.EnvironmentStatus(
        spec=SPEC, state=environment_pb2.ENVIRONMENT_STATE_READY
    )
    status = status_pb2.RunStatus(
        run_id="r",
        state=status_pb2.RUN_STATE_RUNNING,
        environments=[spec],
        servers=[status_pb2.ServerStatus(server_id="a", report=REPORT)],
    )
    event = status_pb2.Event(number=1, severity=status_pb2.SEVERITY_INFO, text="a")
    trajectory = trajectory_pb2.Trajectory.FromString(honest_trajectory())
    lease = fleet_pb2.Lease(
        group_id="g000001", environment="e", members=[0, 1], purpose=1, max_attempts=3
    )
    batch = trainer_pb2.BatchHeader(
        step=1, batch_id="b", num_groups=1, num_trajectories=1
    )
    chunk = trainer_pb2.TrajectoryChunk(trajectories=[trajectory])
    order = weights_pb2.PublishOrder(publish_id="p1", version=VERSION)
    return [
        Reader(
            "trajectory",
            (
                trajectory.SerializeToString(),
                honest_tree(),
                _with_reference(trajectory),
            ),
            lambda data, _: _told(decode_trajectory(data)),
            (ProtocolError,),
            _trajectory,
        ),
        Reader("claim", (trajectory.SerializeToString(), honest_tree()), _claim, ()),
        Reader(
            "tokens",
            (b"\0" * 8,),
            lambda data, _: unpack_tokens(data),
            (ProtocolError,),
        ),
        Reader(
            "logprobs",
            (b"\0" * 8,),
            lambda data, _: unpack_logprobs(data),
            (ProtocolError,),
        ),
        message_reader("status of a run", status, run_from_pb),
        message_reader("status of an environment", spec, environment_from_pb),
        message_reader("event", event, event_from_pb),
        message_reader("layout", LAYOUT, _layout, (ConfigError, ProtocolError)),
        message_reader("lease", lease, lambda m: EpisodeLease.from_pb(m, _sampling())),
        message_reader(
            "order to the trainer",
            trainer_pb2.Directive(batch=batch),
            lambda m: read_order(
                [m, trainer_pb2.Directive(chunk=chunk)], _first_sequence
            ),
        ),
        message_reader(
            "chunk to the trainer",
            trainer_pb2.Directive(chunk=chunk),
            lambda m: read_order(
                [trainer_pb2.Directive(batch=batch), m], _first_sequence
            ),
        ),
        message_reader(
            "publish order",
            trainer_pb2.Directive(publish=order),
            lambda m: read_order([m], _first_sequence),
        ),
        message_reader(
            "command to a client",
            environment_pb2.WorkerCommand(
                call_id=3,
                step=environment_pb2.StepCommand(episode_key="g000001", reply="a"),
            ),
            _commanded,
        ),
        *(
            message_reader(f"answer {number} of an environment", message, _judged)
            for number, message in enumerate(HONEST["ServeEpisodes"][1:], start=1)
        ),
        Reader("record of calls", (b'[["g1.0"], "g1.0", "a.py:1"]\n',), _call_record),
        Reader("image", _images(), lambda data, _: decoded(data), (ValueError,)),
    ]


class Word(Environment):
    """One task; every reply is worth the same."""

    def tasks(self) -> list[str]:
        return ["say a word"]

    def step(self, reply: str) -> StepResult:
        return StepResult(reward=1.0)


def _first_sequence(_: Batch) -> frozenset[int]:
    return frozenset({0})


def _commanded(command: environment_pb2.WorkerCommand) -> object:
    """What a client that serves an environment answers, and what it does with a second one."""
    # No code is loaded that a message names: that is what an order to load is for.
    command.load.spec.reference = command.load.spec.reference and "no_module_of_ours:E"
    if command.WhichOneof("command") == "load" and not command.load.spec.reference:
        command.ClearField("load")

    async def answered() -> list[environment_pb2.WorkerMessage]:
        host = EpisodeHost(Word())
        reset = environment_pb2.ResetCommand(episode_key="g000001")
        answers = [await host.answer(environment_pb2.WorkerCommand(reset=reset))]
        answers += [await host.answer(command), await host.answer(command)]
        await host.close_all()
        return answers

    answers = asyncio.run(answered())
    for answer in answers:
        check_bounds(answer)
    return answers


def _judged(message: environment_pb2.WorkerMessage) -> object:
    """What a rollout server makes of an environment's answer to `reset` and to `step`."""

    async def judged() -> object:
        sent: list[environment_pb2.WorkerCommand] = []
        table = CallTable(sent.append)

        async def timed_out(error: EnvironmentFailed) -> EnvironmentFailed:
            return error

        session = StreamSession(
            table, "g1.0", 5.0, on_timeout=timed_out, on_close=lambda was_judged: None
        )
        values: list[object] = []
        for call in (session.reset(0, 1), session.step("a", truncated=False)):
            asking = asyncio.ensure_future(call)
            await asyncio.sleep(0)
            message.call_id = sent[-1].call_id
            table.answered(message)
            try:
                values.append(await asking)
            except EnvironmentFailed as error:
                values.append(str(error))
        return values

    return asyncio.run(judged())


def _layout(message: weights_pb2.WeightLayout) -> object:
    check_bounds(message)
    return layout_from_pb(message)


def _sampling():
    return SamplingSection(max_reply_tokens=8, max_turns=1, max_episode_tokens=64)
