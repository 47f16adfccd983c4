"""Tokens of roles open what the role needs."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.settings.sections import SecuritySection
from slipstream.protocol.access.checked_calls import MAX_TOLD, Refusals
from slipstream.protocol.access.security import (
    Credentials,
    bind,
    call_metadata,
    create_server,
    open_channel,
)
from slipstream.protocol.access.tokens import (
    RIGHTS,
    may_call,
    read_tokens,
    role_of,
    role_token,
)
from slipstream.v1 import (
    calls_pb2,
    environment_pb2,
    fleet_pb2,
    status_pb2,
    trainer_pb2,
    trajectory_pb2,
)
from support.rigs.small_disks import small_disk
from support.rigs.waiting import LIMIT_S

TOKEN = "t" * 40
OLD = "o" * 40
NEW = "n" * 40
ROOT = Path(__file__).parents[4]
FILES = (calls_pb2, environment_pb2, fleet_pb2, status_pb2, trainer_pb2, trajectory_pb2)


def methods() -> Iterator[str]:
    """All methods that a controller serves."""
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            # The last service is served by rollout servers on a socket, with tokens of its own.
            if service.name != "WorkerService":
                yield from (
                    f"/{service.full_name}/{method.name}" for method in service.methods
                )


def test_each_method_is_open_to_the_roles_that_need_it() -> None:
    trainer = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"]
    reads = {"GetStatus", "Watch", "ListEnvironments"}
    opened = {
        role: {m.rpartition("/")[2] for m in methods() if may_call(role, m)}
        for role in RIGHTS
    }
    assert opened == {
        "reader": reads,
        "client": reads | {"SubmitEnvironment", "ServeEpisodes"},
        "rollout-server": reads
        | {"Join", "CallEnvironments", "Deliver", "Begin", "Keep", "GetSetup"},
        "trainer": reads
        | {"StopRun", "GetSetup"}
        | {method.name for method in trainer.methods},
    }
    # Only the run's own token sends a server away.
    assert may_call(None, "/slipstream.v1.StatusService/DrainServer")


def test_services_of_others_are_open_to_all_roles() -> None:
    assert all(may_call(role, "/grpc.health.v1.Health/Check") for role in RIGHTS)
    # A service of ours whose name only begins like one that is open.
    assert not may_call("rollout-server", "/slipstream.v1.FleetServiceTwo/Join")


def test_a_roles_token_tells_nothing_of_the_runs_and_is_made_once() -> None:
    tokens = {role: role_token(TOKEN, role) for role in RIGHTS}
    assert len(set(tokens.values())) == len(RIGHTS)
    assert all(
        role_of(token) == role and TOKEN not in token for role, token in tokens.items()
    )
    assert role_token(tokens["trainer"], "trainer") == tokens["trainer"]
    assert role_of(TOKEN) is None
    assert role_of("unknown." + TOKEN) is None


def test_a_controller_with_the_token_of_a_role_does_not_start() -> None:
    with pytest.raises(
        ConfigError, match="needs the run's own token, this is that of a trainer"
    ):
        create_server(holding(role_token(TOKEN, "trainer")))


@pytest.mark.process
def test_the_script_writes_the_tokens_that_the_controller_knows(tmp_path: Path) -> None:
    command = [
        ROOT / "deploy" / "make_certificates.sh",
        tmp_path / "secrets",
        "localhost",
    ]
    subprocess.run(command, check=True, capture_output=True)
    folder = tmp_path / "secrets"
    token = (folder / "token").read_text().strip()
    for role in RIGHTS:
        file = folder / f"{role.replace('-', '_')}_token"
        assert file.read_text().strip() == role_token(token, role)
        assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.process
@pytest.mark.parametrize("pages", [2, 4, 6, 9])
def test_a_full_disk_leaves_no_secret_that_a_later_call_would_keep(
    tmp_path, pages: int
) -> None:
    with small_disk(tmp_path / "disk", f"size={4 * pages}k") as disk:
        command = [
            ROOT / "deploy" / "make_certificates.sh",
            disk / "secrets",
            "localhost",
        ]
        assert subprocess.run(command, check=False, capture_output=True).returncode
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        subprocess.run(command, check=True, capture_output=True)
        secrets = [*disk.glob("secrets/*token"), *disk.glob("secrets/*password")]
        assert len(secrets) == 8
        assert all(len(file.read_text()) > 64 for file in secrets)
        verify = ["openssl", "verify", "-CAfile", "ca.pem", "server.pem"]
        subprocess.run(verify, check=True, capture_output=True, cwd=disk / "secrets")


async def answer_to(channel, method, credentials, limit_s=20.0):
    """The code with which a call without a handler behind it ends: UNIMPLEMENTED if it is open."""
    call = channel.unary_unary(method)
    try:
        await call(b"", metadata=call_metadata(credentials), timeout=limit_s)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def holding(token: str) -> Credentials:
    return Credentials(token=token)


class Answers(grpc.GenericRpcHandler):
    """Answers every method with nothing."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, context: object) -> bytes:
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextlib.asynccontextmanager
async def serving(credentials: Credentials):
    """A channel to a server of these credentials that answers every method."""
    server = create_server(credentials)
    server.add_generic_rpc_handlers((Answers(),))
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', credentials)}"
    await server.start()
    async with open_channel(address, credentials) as channel:
        yield channel
    await server.stop(None)


async def test_a_call_beyond_its_role_is_refused_in_one_line() -> None:
    rollout = holding(role_token(TOKEN, "rollout-server"))
    submit = "/slipstream.v1.EnvironmentService/SubmitEnvironment"
    async with serving(holding(TOKEN)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(submit)(
                b"", metadata=call_metadata(rollout), timeout=LIMIT_S
            )
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert caught.value.details() == (
            f"the token of a rollout-server does not open {submit} (docs/security.md)"
        )
        status = "/slipstream.v1.StatusService/GetStatus"
        assert await answer_to(channel, status, rollout) == "OK"
        assert await answer_to(channel, submit, holding(TOKEN)) == "OK"
        forged = holding("rollout-server." + "0" * 64)
        assert await answer_to(channel, status, forged) == "UNAUTHENTICATED"


async def test_further_tokens_are_accepted_and_that_of_one_role_is_taken_back(
    tmp_path,
) -> None:
    old_token = role_token(OLD, "reader")
    (tmp_path / "token").write_text(f"{NEW}\n{OLD}\n-{old_token}\n")
    credentials = Credentials.load(SecuritySection(token_file=tmp_path / "token"))
    method = "/slipstream.v1.StatusService/GetStatus"
    async with serving(credentials) as channel:
        assert await answer_to(channel, method, holding(old_token)) == "UNAUTHENTICATED"
        other_tokens = (NEW, OLD, role_token(OLD, "trainer"), role_token(NEW, "reader"))
        assert [
            await answer_to(channel, method, holding(other)) for other in other_tokens
        ] == ["OK"] * 4


async def test_refused_callers_are_told_once_a_minute(caplog) -> None:
    minute = [0]
    refusals = Refusals(lambda: minute[0])
    for host in ["a", "b", "a", *map(str, range(2 * MAX_TOLD))]:
        refusals.tell(host, "no token")
    assert len(caplog.records) == MAX_TOLD
    assert [record.getMessage() for record in caplog.records[:3]] == [
        f"a call of {host} is refused: no token" for host in "ab0"
    ]
    minute[0] += 1
    refusals.tell("a", "no token")
    assert len(caplog.records) == MAX_TOLD + 1


async def test_a_refused_call_is_in_the_log_with_its_host(caplog) -> None:
    async with serving(holding(TOKEN)) as channel:
        for _ in range(2):
            assert await answer_to(channel, "/a.B/C", holding(OLD)) == "UNAUTHENTICATED"
    assert [record.getMessage() for record in caplog.records] == [
        "a call of ipv4:127.0.0.1 is refused: the token is missing or wrong (security.token_file)"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n".join([TOKEN] * 65), "at most 64 lines, .* has 65"),
        (f"-{role_token(TOKEN, 'reader')}", "takes back a role's token"),
        (f"{TOKEN}\n-{OLD}", "takes back a role's token"),
        (f"{TOKEN}\nshort", "at least 32 characters a line, .* has 5"),
        (f"{TOKEN}\n\n{OLD}", "at least 32 characters a line, .* has 0"),
        ("ü" * 40, "printable ASCII"),
    ],
)
def test_each_line_of_a_token_file_must_be_a_token(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_tokens(tmp_path / "token")
