"""The part of a rollout server that sends the answered calls of agents to the controller.

Consumes: answered calls. Produces: messages for the controller. Waits for: its answer. Unblocked
by: that, or the end of the episode; what was not sent then goes before the next join.
"""

import asyncio
import logging
from collections.abc import Sequence

import grpc
import grpc.aio
from slipstream.core.errors import ProtocolError
from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId
from slipstream.extensions.agent_recovery.call_codec import record_from_pb, record_to_pb
from slipstream.protocol.bounds import max_message_bytes
from slipstream.rollout_server.agents.call_records import CallRecord, CallRecords, EpisodeName
from slipstream.rollout_server.episodes.play import ServiceFailed
from slipstream.rollout_server.part import ServerPart
from slipstream.v1 import calls_pb2 as pb
from slipstream.v1 import calls_pb2_grpc

# Seconds for one answer of the controller, and until it is asked again.
ANSWER_S = 30.0
RETRY_S = 0.2
# Codes of a controller that is away, slow, or about to be.
AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)

log = logging.getLogger(__name__)


class RemoteCallRecords:
    """Keeps calls at the controller."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._stub = calls_pb2_grpc.CallRecordServiceStub(channel)
        self._metadata = metadata
        # Calls that the controller has not confirmed, in the order in which they were answered.
        self._unsent: dict[tuple[EpisodeName, int], pb.KeepCallRequest] = {}
        # The cause of a wait that was said last.
        self._told = ""

    async def begin(self, episode: EpisodeName, *, anew: bool) -> Sequence[CallRecord]:
        """Implements `CallRecords`; calls that cannot be read are left out, with a line.

        Raises ServiceFailed where the lease is over, and for a controller that keeps no calls.
        """
        request = pb.BeginEpisodeRequest(episode=_name(episode), anew=anew)
        while True:
            try:
                stream = self._stub.Begin(request, metadata=self._metadata, timeout=ANSWER_S)
                messages = [message async for message in stream]
                break
            except grpc.aio.AioRpcError as error:
                if error.code() not in AWAY:
                    raise ServiceFailed(f"agents.recover: {error.details()}") from error
                self._tell(error)
            await asyncio.sleep(RETRY_S)
        records = []
        for message in messages:
            try:
                records.append(record_from_pb(message))
            except ProtocolError as error:
                log.warning("a kept call of %s is left out: %s", episode, error)
        return records

    async def keep(self, episode: EpisodeName, call: int, record: CallRecord) -> None:
        """Implements `CallRecords`; a call that is too large for a message is not kept.

        Raises ServiceFailed where the lease is over, and for a controller that keeps no calls.
        """
        request = pb.KeepCallRequest(episode=_name(episode), call=call, record=record_to_pb(record))
        if request.ByteSize() > max_message_bytes(pb.KeepCallRequest):
            log.warning("call %d of %s is too large to be kept", call, episode)
            return
        key = (episode, call)
        self._unsent[key] = request
        while key in self._unsent:
            try:
                await self._send(key)
            except grpc.aio.AioRpcError as error:
                if error.code() not in AWAY:
                    raise ServiceFailed(f"agents.recover: {error.details()}") from error
                self._tell(error)
                await asyncio.sleep(RETRY_S)

    async def send_all(self) -> None:
        """Sends all calls that wait; raises AioRpcError while the controller is away."""
        for key in list(self._unsent):
            if key not in self._unsent:
                continue
            try:
                await self._send(key)
            except grpc.aio.AioRpcError as error:
                if error.code() in AWAY:
                    raise
                log.warning("a call of %s is not kept: %s", key[0], error.details())

    def _tell(self, error: grpc.aio.AioRpcError) -> None:
        """Says in the log, once for each cause, why calls wait."""
        cause = f"{error.code().name}: {error.details()}"
        if cause != self._told:
            log.warning("calls of agents wait for the controller: %s", cause)
        self._told = cause

    async def _send(self, key: tuple[EpisodeName, int]) -> None:
        try:
            await self._stub.Keep(self._unsent[key], metadata=self._metadata, timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            if error.code() not in AWAY:
                self._unsent.pop(key, None)
            raise
        self._unsent.pop(key, None)


class RecoveryPart(ServerPart):
    """Gives episodes of agents the place where their calls are kept."""

    def __init__(self, config: Config, server: ServerId) -> None:  # noqa: ARG002 - as of all parts
        self._records: RemoteCallRecords | None = None

    def call_records(
        self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]
    ) -> CallRecords:
        """Returns what keeps the calls of all epochs of this server."""
        self._records = RemoteCallRecords(channel, metadata)
        return self._records

    async def before_join(self) -> None:
        """Sends calls that were answered while the controller was away."""
        if self._records is not None:
            await self._records.send_all()


def _name(episode: EpisodeName) -> pb.EpisodeName:
    return pb.EpisodeName(
        group_id=episode.group_id,
        member=episode.member,
        attempt=episode.attempt,
        server_epoch=episode.server_epoch,
    )
