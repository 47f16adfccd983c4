"""What a user types wrong is said in one line, at once."""

import asyncio
import http.server
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from slipstream.client.cli import parse
from slipstream.core.configuration.config_file import load_config
from slipstream.core.machine.address import free_port
from support.rigs.run_processes import (
    SLOW,
    address_of,
    check_refused,
    command,
    copy_environments,
    run_command,
    succeed,
    write_config,
)
from support.rigs.waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures("nothing_survives")

NOWHERE = "127.0.0.1:9"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A working directory with a configuration and environments; no test changes it."""
    folder = copy_environments(tmp_path_factory.mktemp("work"))
    write_config(folder, tiny_model)
    (folder / "broken.toml").write_text("[run\n")
    (folder / "broken.jinja").write_text("{% if messages %}")
    (folder / "used" / "journal").mkdir(parents=True)
    (folder / "used" / "journal" / "journal.log").write_text("a record")
    weightless = folder / "weightless"
    shutil.copytree(
        tiny_model, weightless, ignore=shutil.ignore_patterns("*.safetensors")
    )
    return folder


@pytest.fixture(scope="module")
def web_server() -> Iterator[str]:
    """Something that listens and is no controller."""
    server = http.server.HTTPServer(
        ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


SETTINGS = {
    "unknown key": ("algorithm.group_sise=3", "did you mean 'group_size'?"),
    "constructor raises": (
        'environments.0={name="e", reference="user_environments:Unmade"}',
        "environment e: Unmade(...) failed: RuntimeError: there is no dataset",
        "user_environments.py",
    ),
    "open address": (
        'controller.address="192.0.2.7:7070"',
        "not loopback",
        "tls_certificate",
    ),
    "broken template": (
        'rollout_server.chat_template="broken.jinja"',
        "slipstream: rollout_server.chat_template: broken.jinja fails: TemplateSyntaxError",
    ),
    "nothing to go on with": (
        'run.resume="must"',
        "run.resume is must",
        "no run to go on with",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_run_that_cannot_work_is_refused_in_one_line(case: str, folder: Path) -> None:
    override, *parts = SETTINGS[case]
    result = run_command("run", "config.toml", override, cwd=folder)
    check_refused(result, *parts)


COMMANDS = {
    "broken file": (["run", "broken.toml"], "broken.toml is no TOML: Expected ']'"),
    "unknown command": (["train"], "there is no command 'train'; did you mean 'run'?"),
    "unknown word": (
        ["frobnicate"],
        "'frobnicate'; commands are quickstart, ",
        "rollout-server",
    ),
    "submit to nobody": (
        ["submit", "m:C", "--controller", NOWHERE],
        "no controller answers",
    ),
    "no address": (["status", "--controller", "nonsense"], "host:port", "'nonsense'"),
    "broken arguments": (
        ["submit", "m:C", "--args", "{"],
        "--args must be a JSON object",
    ),
    "quickstart of another model": (
        ["quickstart", "model.path=weightless"],
        "weightless",
    ),
    "replay of nothing": (["replay", "nowhere"], "nowhere: no such folder"),
    "replay of a file": (
        ["replay", "config.toml"],
        "config.toml: a file, name its folder .",
    ),
    "replay of all runs": (
        ["replay", ".."],
        ".. is no run's folder: it has no config.toml; runs there are ",
    ),
    "replay of a folder": (
        ["replay", "used"],
        "used is no run's folder: it has no config.toml",
    ),
    "one setting without a value": (
        ["run", "config.toml", "--dry-run", "run.name=x", "algorithm.learning_rate"],
        "slipstream: unrecognized arguments: algorithm.learning_rate; a setting is section.key=v",
    ),
    "replay of no run": (["replay", "."], "has no journal"),
    "replay with another sampling": (
        ["replay", ".", "sampling.temperature=0.5"],
        "sampling.temperature cannot be another in a replay: the recorded batches were made with",
    ),
    "bisect with other settings": (
        ["bisect", ".", "--metric", "loss > 3", "algorithm.loss=gspo"],
        "bisect trains by the run's own settings, got algorithm.loss=gspo",
    ),
    "bisect of no metric": (
        ["bisect", ".", "--metric", "loss > 3"],
        "--metric: no recorded step has the metric 'loss'",
    ),
    "server of nobody": (
        [
            "rollout-server",
            "config.toml",
            "--controller",
            NOWHERE,
            "--connect-timeout-s",
            "1",
        ],
        f"no controller answers at {NOWHERE} within 1 s",
    ),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_that_cannot_work_is_refused_in_one_line(
    case: str, folder: Path
) -> None:
    arguments, *parts = COMMANDS[case]
    check_refused(run_command(*arguments, cwd=folder), *parts)


def test_a_server_that_nobody_is_to_start_again_is_refused_with_another_code(
    folder: Path,
) -> None:
    arguments, *parts = COMMANDS["server of nobody"]
    check_refused(run_command(*arguments, "--final", cwd=folder), *parts, code=0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["submit", "m:C"],
        ["rollout-server", "config.toml", "--connect-timeout-s", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_server_that_is_no_controller_is_refused(arguments, folder, web_server):
    result = run_command(*arguments, "--controller", web_server, cwd=folder)
    check_refused(result, f"no controller answers at {web_server}")


def test_a_run_that_trained_no_step_is_not_replayed(
    folder: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(folder, tmp_path / "run", dirs_exist_ok=True)
    (run / "journal" / "batches").mkdir(parents=True)
    replayed = run_command("replay", str(run), cwd=folder)
    check_refused(replayed, f"{run} does not hold the first step's batch")


def test_a_port_in_use_is_refused(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        address = f"127.0.0.1:{occupied.getsockname()[1]}"
        for command in ("run", "learner"):
            override = f'controller.address="{address}"'
            result = run_command(command, "config.toml", override, cwd=folder)
            check_refused(
                result, f"cannot listen on {address}", "in use; another run may have it"
            )


def test_a_wrong_setting_is_told_before_a_port_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        address = f'controller.address="127.0.0.1:{occupied.getsockname()[1]}"'
        wrong = 'rollout_server.chat_template="nowhere"'
        result = run_command("run", "config.toml", address, wrong, cwd=folder)
    check_refused(result, "rollout_server.chat_template must be a file, got nowhere")


def test_help_is_instant_since_it_imports_nothing_of_others() -> None:
    program = (
        "import sys; before = {*sys.modules}\n"
        "try: from slipstream.client.cli import main; main()\n"
        "finally: print(*sys.modules.keys() - before, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert "rollout-server" in result.stdout
    packages = {name.partition(".")[0] for name in result.stderr.split()}
    assert packages - sys.stdlib_module_names == {"slipstream"}


def test_dry_run_prints_what_can_be_read_back(folder: Path, tmp_path: Path) -> None:
    override = "algorithm.max_staleness=5"
    result = succeed("run", "config.toml", override, "--dry-run", cwd=folder)
    assert result.stderr == ""
    printed = tmp_path / "printed.toml"
    printed.write_text(result.stdout)
    assert load_config(printed) == load_config(folder / "config.toml", [override])
    assert load_config(printed).algorithm.max_staleness == 5
    assert not (folder / "run" / "journal").exists()


def test_only_nodes_that_open_the_queue_need_its_password(folder: Path) -> None:
    settings = [
        "learner={world_size=2, ranks_per_node=1}",
        'learner.master="127.0.0.1:29500"',
        'queue={kind="redis", redis_url="redis://127.0.0.1:1"}',
        'queue.controller={user="default", password_file="none"}',
        "--dry-run",
    ]
    first = run_command(
        "learner", "config.toml", *settings, "--node-rank=0", cwd=folder
    )
    check_refused(first, "queue.controller.password_file: none: No such file")
    succeed("learner", "config.toml", *settings, "--node-rank=1", cwd=folder)


STARTS_A_SERVER = (
    "# weights travel by gloo",
    "# vLLM runs the model eagerly: rollout_server.enforce_eager is true on a CPU",
)


@pytest.mark.parametrize("command", ["run", "learner"])
def test_dry_run_prints_the_groups_of_ranks_and_needs_no_weights(
    command: str, folder: Path
):
    override = "learner={world_size=4, parallel={pp=2}}"
    result = run_command(
        command,
        "config.toml",
        override,
        'model.path="weightless"',
        "--dry-run",
        cwd=folder,
    )
    lacking = "model.path must hold safetensors weights, but weightless has none"
    assert result.returncode == 1
    assert result.stderr == (
        f"slipstream: the settings are right, but nothing can start here: {lacking}\n"
    )
    assert tomllib.loads(result.stdout)["learner"]["world_size"] == 4
    notes = [line for line in result.stdout.splitlines() if line.startswith("#")]
    sizes = notes[6:15]
    assert sizes[0].startswith("# If each of a step's ")
    assert sizes[2].startswith("# a trainer rank keeps ")
    assert sizes[-1].startswith("# the journal grows by at most ")
    assert [*notes[:6], *notes[16:]] == [
        "# replies end at </s> (2) of the model",
        "# The trainer's ranks:",
        "# 4 ranks: tp 1, pp 2, cp 1, dp 2",
        "# dp: 2 x 2: [0 1] [2 3]",
        "# pp: 2 x 2: [0 2] [1 3]",
        "#",
        "# The GPUs of what starts here:",
        "# no GPU is used",
        *(STARTS_A_SERVER if command == "run" else []),
        "#",
        "# Only sizes were checked. Before a run can start:",
        f"# {lacking}",
    ]


@pytest.mark.long
def test_a_template_that_writes_no_tools_is_told_before_anything_starts(
    folder: Path,
) -> None:
    parser = 'rollout_server.tool_parser="hermes"'
    result = run_command("run", "config.toml", parser, "--dry-run", cwd=folder)
    assert result.stderr.startswith(
        "slipstream: warning: rollout_server.tool_parser is set, but the chat template in "
    )
    assert (
        "writes no tools, so that the model never sees those that it is offered"
        in result.stderr
    )
    assert tomllib.loads(result.stdout)["rollout_server"]["tool_parser"] == "hermes"


@pytest.mark.parametrize("command", ["run", "learner", "rollout-server"])
def test_every_dry_run_checks_the_engine(command: str, folder: Path) -> None:
    override = 'rollout_server.chat_template="nowhere"'
    result = run_command(command, "config.toml", override, "--dry-run", cwd=folder)
    check_refused(result, "rollout_server.chat_template must be a file, got nowhere")


@pytest.mark.long
async def test_of_two_commands_that_start_one_run_together_one_goes_on(
    tmp_path, tiny_model
):
    write_config(copy_environments(tmp_path), tiny_model)
    addresses = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]
    async with AsyncExitStack() as stack:
        runs = [
            await stack.enter_async_context(
                command(
                    tmp_path / address[-5:],
                    "run",
                    "config.toml",
                    f"controller.address={address}",
                    cwd=tmp_path,
                )
            )
            for address in addresses
        ]
        ends = {asyncio.ensure_future(run.wait(120.0)): run for run in runs}
        done, waiting = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        refused = ends[done.pop()]
        for end in waiting:
            end.cancel()
        (other,) = [
            a for a, run in zip(addresses, runs, strict=True) if run is not refused
        ]
        assert refused.process.returncode == 2
        assert "run is written by a run that goes on; wait for its end" in refused.err
        assert SLOW.sub("", refused.out) == ""
        assert address_of(tmp_path / "run" / "config.toml") == other


def test_overrides_may_stand_among_the_options():
    mixed = parse(
        ["run", "a.toml", "run.steps=2", "--dry-run", "algorithm.max_staleness=0"]
    )
    assert mixed.overrides == ["run.steps=2", "algorithm.max_staleness=0"]
    assert mixed.dry_run
