"""Messages of kept calls."""

from slipstream.v1 import calls_pb2 as pb
from slipstream.v1 import trajectory_pb2


def episode(
    group: str = "g000001",
    member: int = 0,
    attempt: int = 0,
    epoch: int = 9,
) -> pb.EpisodeName:
    """The name of an attempt."""
    return pb.EpisodeName(
        group_id=group,
        member=member,
        attempt=attempt,
        server_epoch=epoch,
    )


def call(number: int, **name: object) -> pb.KeepCallRequest:
    """A call of one token, in the attempt that `name` changes."""
    version = trajectory_pb2.PolicyVersion(step=1)
    record = pb.CallRecord(
        request_digest=bytes([number]),
        version_spans=[
            trajectory_pb2.VersionSpan(
                length=1,
                version=version,
            )
        ],
    )
    return pb.KeepCallRequest(
        episode=episode(**name),
        call=number,
        record=record,
    )
