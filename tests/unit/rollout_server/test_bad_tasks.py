"""Groups of a bad task and of others beside it, in real workers of one server."""

from pathlib import Path

import pytest
from slipstream.core.types import FailureKind, Status
from slipstream.v1 import environment_pb2, fleet_pb2

pytestmark = pytest.mark.process


@pytest.mark.long
async def test_a_task_that_ends_its_worker_costs_the_others_no_attempt(
    start_server,
) -> None:
    async with start_server(heartbeat_timeout_s=60.0) as server:
        connection = await server.join()
        spec = environment_pb2.EnvironmentSpec(
            name="exiting",
            reference="odd_environments:Exiting",
            timeout_s=60.0,
            search_path=str(Path(__file__).parent / "episodes"),
        )
        connection.send(environment=fleet_pb2.EnvironmentOrder(spec=spec))
        await connection.wait_for("environment")
        for group, task in (("bad", 0), ("good", 1), ("better", 2)):
            connection.lease(
                group,
                environment="exiting",
                task_index=task,
                members=[0, 1],
                max_attempts=2,
                timeout_s=60.0,
            )
        for group in ("bad", "good", "better"):
            await connection.wait_for(
                "lease", lambda report, group=group: report.group_id == group
            )
        report = await connection.wait_quiet()
    trajectories = server.fleet.trajectories
    for member in (0, 1):
        for group in ("good", "better"):
            attempts = [
                t for t in trajectories if (t.group_id, t.member) == (group, member)
            ]
            attempts.sort(key=lambda t: t.attempt)
            assert attempts[-1].status is Status.COMPLETED
            assert {t.failure.kind for t in attempts[:-1]} <= {FailureKind.BYSTANDER}
        bad = [t for t in trajectories if (t.group_id, t.member) == ("bad", member)]
        bad.sort(key=lambda t: t.attempt)
        own_failures = [t for t in bad if t.failure.kind is not FailureKind.BYSTANDER]
        assert [t.failure.kind for t in own_failures] == [FailureKind.ENVIRONMENT] * 2
        assert [t.will_retry for t in own_failures] == [True, False]
        # The other episodes decide whether a lone end was needed to find the task.
        assert (
            own_failures[-1].failure.message.partition(";")[0]
            == "worker exited with code 7"
        )
    # Every token that was sampled was delivered.
    assert report.ended_tokens == sum(t.num_sampled_tokens for t in trajectories)
    assert report.generated_tokens == report.ended_tokens
