"""What honest callers of the controller say, by method: the fuzzer changes some of it."""

from google.protobuf.message import Message
from slipstream.v1 import (
    environment_pb2,
    fleet_pb2,
    status_pb2,
    trainer_pb2,
    trajectory_pb2,
    weights_pb2,
)

from support.fakes.fake_server import LAYOUT
from support.fakes.fake_trainer import PROBE

VERSION = trajectory_pb2.PolicyVersion(step=2)
DIGEST = b"d" * 16
SPEC = environment_pb2.EnvironmentSpec(
    name="new",
    reference="m:E",
    args_json="{}",
    weight=1.0,
    timeout_s=1.0,
    num_workers=1,
    purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING,
)
FAILURE = trajectory_pb2.Failure(
    kind=trajectory_pb2.FAILURE_KIND_ENVIRONMENT, message="broken"
)
COMMUNICATOR = weights_pb2.Communicator(
    communicator_id="c1",
    transport="gloo",
    store_host="127.0.0.1",
    store_port=9,
    world_size=2,
)
CHAT = [environment_pb2.ChatMessage(role="user", content="a b")]
REPORT = fleet_pb2.ServerReport(
    generated_tokens=9,
    in_flight_tokens=4,
    ended_tokens=5,
    ended_episodes=1,
    sent=trajectory_pb2.Amount(trajectories=1, tokens=5),
    busy_s=1.0,
)

HONEST: dict[str, list[Message]] = {
    "SubmitEnvironment": [environment_pb2.SubmitEnvironmentRequest(spec=SPEC)],
    "ServeEpisodes": [
        environment_pb2.WorkerMessage(
            hello=environment_pb2.WorkerHello(spec=SPEC, num_tasks=3, max_episodes=64)
        ),
        environment_pb2.WorkerMessage(
            call_id=1, observation=environment_pb2.Observation(messages=CHAT)
        ),
        environment_pb2.WorkerMessage(
            call_id=1,
            verdict=environment_pb2.Verdict(reward=1.0, metrics={"right": 1.0}),
        ),
        environment_pb2.WorkerMessage(call_id=2, failure=FAILURE),
        environment_pb2.WorkerMessage(call_id=2, pong=environment_pb2.Pong(place="x")),
    ],
    "Join": [
        fleet_pb2.ServerMessage(heartbeat=REPORT),
        fleet_pb2.ServerMessage(drained=REPORT),
        fleet_pb2.ServerMessage(draining=fleet_pb2.Draining(reason="told")),
        fleet_pb2.ServerMessage(
            lease=fleet_pb2.LeaseReport(
                group_id="g000003", closed=True, unfinished=[0, 1], next_attempt=1
            )
        ),
        fleet_pb2.ServerMessage(
            environment=fleet_pb2.EnvironmentReport(environment="e", num_tasks=10)
        ),
        fleet_pb2.ServerMessage(
            environment=fleet_pb2.EnvironmentReport(environment="new", failure=FAILURE)
        ),
        fleet_pb2.ServerMessage(
            publish=fleet_pb2.PublishReport(
                publish_id="p1",
                phase=fleet_pb2.PUBLISH_PHASE_READY,
                bucket_digests=[DIGEST],
                probe_logprobs=PROBE.expected_logprobs,
                stages=fleet_pb2.PublishStages(prepare_s=1.0),
            )
        ),
        fleet_pb2.ServerMessage(
            publish=fleet_pb2.PublishReport(
                publish_id="p1", phase=fleet_pb2.PUBLISH_PHASE_SERVING
            )
        ),
    ],
    "CallEnvironments": [
        fleet_pb2.EnvironmentCall(
            environment="new",
            command=environment_pb2.WorkerCommand(
                call_id=4,
                reset=environment_pb2.ResetCommand(episode_key="g1.0", seed=3),
            ),
        ),
        fleet_pb2.EnvironmentCall(
            environment="liar-1",
            command=environment_pb2.WorkerCommand(
                call_id=5,
                step=environment_pb2.StepCommand(episode_key="g1.0", reply="a"),
            ),
        ),
    ],
    "Register": [
        trainer_pb2.TrainerHello(
            world_size=1, layout_description="a\nb", version=VERSION, num_senders=1
        ),
        trainer_pb2.TrainerHello(
            world_size=1, layout_description="a", num_parameters=9
        ),
    ],
    "Next": [trainer_pb2.NextRequest(version=VERSION, bucket_digests=[DIGEST])],
    "ReportStep": [
        trainer_pb2.StepReport(
            step=step,
            batch_id=f"b{step}",
            version=trajectory_pb2.PolicyVersion(step=step + 1),
            weight_digest=DIGEST,
            metrics={"reward_mean": 0.5},
            wall_s=0.1,
        )
        for step in (1, 2)
    ],
    "StartPublish": [
        trainer_pb2.PublishStart(
            publish_id="p1", layout=LAYOUT, communicator=COMMUNICATOR
        ),
        trainer_pb2.PublishStart(publish_id="p1", is_question=True),
    ],
    "FinishPublish": [
        trainer_pb2.PublishResult(publish_id="p1", bucket_digests=[DIGEST], probe=PROBE)
    ],
    "ReportCheckpoint": [
        trainer_pb2.CheckpointReport(
            version=VERSION, weight_digest=DIGEST, path="c/step-2"
        )
    ],
    "ReportFailure": [trainer_pb2.TrainerFailure(message="out of memory", rank=1)],
    "Finish": [trainer_pb2.TrainerGoodbye(weight_digest=DIGEST, export_path="final")],
    "Watch": [status_pb2.WatchRequest(after=3)],
    "StopRun": [status_pb2.StopRunRequest(reason="enough")],
    "DrainServer": [
        status_pb2.DrainServerRequest(server_id="fake", reason="elsewhere")
    ],
}
