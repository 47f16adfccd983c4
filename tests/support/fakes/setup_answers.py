"""What a controller answers to who is about to join it, without a run behind it."""

import time

from slipstream.v1 import status_pb2, status_pb2_grpc


class SetupAnswers(status_pb2_grpc.StatusServiceServicer):
    """Answers `GetSetup` with one setup and the present time; a time in the setup goes before."""

    def __init__(self, setup: status_pb2.Setup) -> None:
        self._setup = setup

    async def GetSetup(  # noqa: N802
        self, request: status_pb2.GetSetupRequest, context: object
    ) -> status_pb2.Setup:
        setup = status_pb2.Setup(unix_time_s=time.time())
        setup.MergeFrom(self._setup)
        return setup
