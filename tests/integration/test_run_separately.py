"""Learner and rollout server started by hand, as on two machines; plain and over TLS."""

import secrets
import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from support.rigs.run_processes import (  # noqa: E402
    Command,
    address_of,
    check_ledger,
    command,
    copy_environments,
    run_command,
    summary_of,
    write_config,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("nothing_survives"),
]

RUN_LIMIT_S = 150.0
SIZES = {
    "run__steps": 3,
    "evaluations": [],
    "environments": [{"name": "repeat", "reference": "user_environments:Repeat"}],
    "algorithm__group_size": 8,
    "algorithm__groups_per_step": 8,
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, a certificate of 127.0.0.1 by it, and a token."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    openssl("req", "-x509", *key, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", *key[:-2], "-subj", "/CN=127.0.0.1", "-keyout", "server.key", "-out", "request")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1")
    openssl("x509", "-req", "-in", "request", *signed, "-extfile", "names", "-out", "server.pem")
    (folder / "token").write_text(secrets.token_hex(32))
    (folder / "wrong-token").write_text(secrets.token_hex(32))
    return folder


async def run_both(folder: Path, config: Path, *options: str) -> tuple[Command, Command]:
    """A learner and a server in working directories of their own, from their start to their end."""
    elsewhere = copy_environments(folder / "elsewhere")
    server_options = ("--controller", address_of(config), "--server-id", "mine", *options)
    # The server may come first: it waits.
    async with (
        command(
            folder / "server",
            *("rollout-server", config, f'run.dir="{elsewhere}"', *server_options),
            cwd=elsewhere,
        ) as server,
        command(folder / "learner", "learner", config, cwd=folder) as learner,
    ):
        assert await learner.wait(RUN_LIMIT_S) == 0, learner.out + learner.err + server.err
        assert await server.wait(30) == 0, server.out + server.err
    return learner, server


def check_run(folder: Path, learner: Command, server: Command) -> None:
    assert learner.err == server.err == ""
    assert "rollout server mine joined" in learner.out
    lines = server.out.splitlines()
    # A check of environments that takes long has a line before them.
    assert lines[-2].startswith("rollout server mine joins ")
    assert lines[-1] == "rollout server mine has left"
    summary = summary_of(folder / "run")
    assert summary["steps"] == 3
    check_ledger(summary)


async def test_services_that_are_started_by_hand_finish_a_run(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(copy_environments(tmp_path), tiny_model, **SIZES)
    check_run(tmp_path, *await run_both(tmp_path, config))


def write_secured_config(folder: Path, model: Path, certificates: Path) -> Path:
    return write_config(
        copy_environments(folder),
        model,
        **SIZES,
        security__tls_certificate=str(certificates / "server.pem"),
        security__tls_key=str(certificates / "server.key"),
        security__tls_ca=str(certificates / "ca.pem"),
        security__token_file=str(certificates / "token"),
    )


async def test_services_finish_a_run_over_tls_with_a_token(
    tmp_path: Path, tiny_model: Path, certificates: Path
) -> None:
    config = write_secured_config(tmp_path, tiny_model, certificates)
    check_run(tmp_path, *await run_both(tmp_path, config))


async def test_callers_without_the_right_secrets_are_refused_in_one_line(
    tmp_path: Path, tiny_model: Path, certificates: Path
) -> None:
    config = write_secured_config(tmp_path, tiny_model, certificates)
    address = address_of(config)
    ca = ("--tls-ca", certificates / "ca.pem")
    async with command(tmp_path / "learner", "learner", config, cwd=tmp_path) as learner:
        wrong = f'security.token_file="{certificates / "wrong-token"}"'
        async with command(
            tmp_path / "server",
            *("rollout-server", config, wrong, f'run.dir="{tmp_path / "other"}"'),
            cwd=tmp_path,
        ) as server:
            assert await server.wait(120) == 2
            assert server.engines() == []
        assert server.err == (
            f"slipstream: the controller at {address}: the token is missing or wrong "
            "(security.token_file)\n"
        )
        for options, cause in (
            ((*ca, "--token-file", certificates / "wrong-token"), "token is missing or wrong"),
            (ca, "token is missing or wrong"),
            (("--token-file", certificates / "token"), "TLS"),
        ):
            refused = run_command("status", "--controller", address, *options)
            assert refused.returncode == 2
            assert len(refused.stderr.splitlines()) == 1
            assert cause in refused.stderr
        good = run_command(
            *("status", "--controller", address, *ca, "--token-file", certificates / "token")
        )
        assert good.returncode == 0, good.stderr
        stopped = run_command(
            *("stop", "--controller", address, *ca, "--token-file", certificates / "token")
        )
        assert stopped.returncode == 0, stopped.stderr
        assert await learner.wait(60) == 0, learner.out + learner.err
    assert learner.err == ""
