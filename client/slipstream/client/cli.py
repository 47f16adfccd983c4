"""Parses the command line and runs its command.

Heavy imports wait until the arguments are known, so `--help` is instant.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import importlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

_LAUNCHER = "slipstream.client.launch.launcher"
_RETRAINING = "slipstream.client.launch.retraining"
CONNECTION_FILES = {
    "--token-file": "the caller's token",
    "--tls-ca": "the authority of the controller's certificate",
    "--tls-certificate": "the caller's certificate",
    "--tls-key": "its private key",
}
EXAMPLES = {
    "quickstart": "slipstream quickstart run.steps=50",
    "run": "slipstream run deploy/configs/quickstart.toml run.name=second run.steps=50",
    "tinker": "slipstream tinker deploy/configs/smallest.toml environments=[] --port 8000",
    "learner": "slipstream learner run.toml --node-rank 1 --master 10.0.0.1:29500",
    "rollout-server": "slipstream rollout-server run.toml --controller 10.0.0.1:7070",
    "submit": "slipstream submit my_tasks:Reverse --args '{\"length\": 3}' --weight 0.5",
    "status": "slipstream status letters",
    "drain": "slipstream drain server-1 letters --reason maintenance",
    "stop": "slipstream stop letters --reason 'the reward is high enough'",
    "check": "slipstream check deploy/configs/quickstart.toml algorithm.loss=my_losses:loss",
    "replay": "slipstream replay runs/quickstart --from 100 algorithm.loss=gspo",
    "bisect": 'slipstream bisect runs/quickstart --metric "loss > 3"',
    "verify": "slipstream verify runs/quickstart",
    "set-aside": "slipstream set-aside runs/quickstart 17",
    "export": "slipstream export runs/quickstart --step 100 --out model",
    "page": "slipstream page runs/first runs/second --out both.html",
    "doctor": "slipstream doctor deploy/configs/quickstart.toml",
}
# Names of commands in other programs, and ours.
FAMILIAR_COMMANDS = {
    "train": "run",
    "start": "run",
    "launch": "run",
    "resume": "run",
    "runs": "status",
    "list": "status",
    "ps": "status",
    "kill": "stop",
    "cancel": "stop",
    "server": "rollout-server",
    "serve": "rollout-server",
    "worker": "rollout-server",
    "validate": "check",
    "audit": "check",
    "help": "--help",
    "version": "--version",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    0 means done. 1 means that the run failed, or that a dry run found the settings right but this
    machine unable to start. 2 (0 with `--final`) means that the command or its configuration cannot
    work. 5, with `--final` alone, means that a rollout server has left a run that may go on. 128
    plus a signal's number means that this signal ended a run before its last step.
    """
    # A file or a connection would be opened in place of what the shell has closed.
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    arguments = parse(argv)
    # The log of gRPC's core is of no use at a terminal.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from slipstream.client.terminal import complain
    from slipstream.core.errors import (
        DONE,
        RUN_STOPPED,
        ConfigError,
        EnvironmentFailed,
        SlipstreamError,
    )

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            # A terminal of another encoding lacks characters of replies and names.
            stream.reconfigure(errors="backslashreplace")
    # Whether a scheduler starts the command again after any code but 0.
    is_restarted = getattr(arguments, "final", False)
    try:
        result = arguments.execute(arguments)
        code = int(asyncio.run(result) if asyncio.iscoroutine(result) else result)
        return DONE if code == RUN_STOPPED and not is_restarted else code
    except (ConfigError, EnvironmentFailed) as error:
        complain(str(error))
        return 0 if is_restarted else 2
    except SlipstreamError as error:
        complain(str(error))
        return 1
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        complain(f"{error.filename}: {error.strerror}")
        return 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, as all other errors are reported."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"slipstream: {message}; see {self.prog} --help\n")


class _Version(argparse.Action):
    """Looks the version up only when the option is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        from importlib.metadata import version

        print(f"slipstream {version('slipstream-rl')}")
        parser.exit()


def seconds(text: str) -> float:
    """Returns the time that an option states; raises ArgumentTypeError for none, or 30 years."""
    value = float(text)
    if not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"a time is above 0 and at most 1e9 seconds, got {text}")
    return value


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns a command's arguments, settings among options; exits with 2 for a wrong line."""
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    _check_first_word(parser, words)
    arguments, rest = parser.parse_known_args(words)
    if rest and not rest[0].startswith("-") and getattr(arguments, "run", "") is None:
        # argparse takes no optional RUN behind options that stand behind another argument.
        arguments.run = rest.pop(0)
    overrides = [text for text in rest if "=" in text and not text.startswith("-")]
    takes_settings = "overrides" in arguments
    unknown = [text for text in rest if text not in overrides] if takes_settings else rest
    if unknown:
        hint = "; a setting is section.key=value" if takes_settings else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if rest:
        arguments.overrides = [*arguments.overrides, *overrides]
    return arguments


def _check_first_word(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Exits with 2 if the first word is neither a command nor an option of all commands."""
    if not words or words[0] in EXAMPLES:
        return
    word = words[0]
    options = ("--help", "-h", "--version")
    if any(option.startswith(word) for option in options):
        return
    from slipstream.core.errors import did_you_mean, near_names

    familiar = FAMILIAR_COMMANDS.get(word)
    near = [familiar] if familiar else near_names(word, (*EXAMPLES, *options[::2]))
    hint = did_you_mean(near) if near else f"commands are {', '.join(EXAMPLES)}"
    parser.error(f"there is no {'option' if word.startswith('-') else 'command'} {word!r}; {hint}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slipstream",
        description="Asynchronous reinforcement learning for language models.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print it and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_services(commands)
    _add_requests(commands)
    _add_retraining(commands)
    _add_folder_commands(commands)
    _add_checks(commands)
    _add_page(commands)
    for name, command in commands.choices.items():
        command.epilog = f"example: {EXAMPLES[name]}"
    return parser


def _add_services(commands: argparse._SubParsersAction[_Parser]) -> None:
    first = commands.add_parser("quickstart", help="make a tiny model here and train it")
    _add_overrides(first)
    _set_program(first, f"{_LAUNCHER}:run_quickstart")

    run = commands.add_parser("run", help="everything on this machine")
    _add_start(run, is_optional=True)
    run.add_argument(
        "--model", metavar="NAME", help="for model.path: a folder, or a name on the hub"
    )
    run.add_argument("--environment", metavar="MODULE:CLASS", help="for the only environment")
    run.add_argument("--steps", type=int, help="for run.steps")
    run.set_defaults(execute=_run)

    tinker = commands.add_parser("tinker", help="a run for a loop of your own: the Tinker API")
    _add_start(tinker)
    tinker.add_argument(
        "--port", type=int, default=0, help="of the HTTP process; default: a free one"
    )
    tinker.add_argument(
        "--in-flight", action="store_true", help="older sessions sample by the newest weights, too"
    )
    _set_program(tinker, f"{_LAUNCHER}:run_tinker")

    learner = commands.add_parser(
        "learner", help="the trainer ranks of this node; on node 0 the controller too"
    )
    _add_start(learner)
    _add_node(learner)
    learner.add_argument(
        "--connect-timeout-s",
        type=seconds,
        help="how long to wait for the first node, and for a queue that another program starts",
    )
    _set_program(learner, f"{_LAUNCHER}:run_learner")

    server = commands.add_parser("rollout-server", help="one vLLM engine and its episodes")
    _add_start(server)
    server.add_argument("--controller", metavar="HOST:PORT", help="default: controller.address")
    server.add_argument("--server-id", help="a name that stays the same after a restart")
    server.add_argument(
        "--connect-timeout-s",
        type=seconds,
        default=300.0,
        help="how long to wait for the controller, and for a queue that another program starts; "
        "default: 300",
    )
    server.add_argument(
        "--final",
        action="store_true",
        help="for Docker, which starts it again after any code but 0: end with 0 when refused, "
        "and with 5 when the run was stopped or has failed",
    )
    _set_program(server, f"{_LAUNCHER}:run_rollout_server")


def _add_retraining(commands: argparse._SubParsersAction[_Parser]) -> None:
    replay = commands.add_parser(
        "replay",
        help="train a run again from its journal and compare, also beside other settings",
    )
    _add_folder(replay)
    _add_overrides(replay)
    replay.add_argument(
        "--from",
        dest="first",
        type=int,
        metavar="STEP",
        help="the first step with other settings; begins with the checkpoint before it",
    )
    replay.add_argument(
        "--to",
        dest="last",
        type=int,
        metavar="STEP",
        help="the last step; default: all",
    )
    _set_program(replay, f"{_RETRAINING}:run_replay")

    bisect = commands.add_parser(
        "bisect",
        help="name the group at which a metric broke a bound, by training without halves",
    )
    _add_folder(bisect)
    _add_overrides(bisect)
    bisect.add_argument(
        "--metric",
        required=True,
        metavar="CONDITION",
        help='such as "loss > 3" or "kl >= 0.5"',
    )
    bisect.add_argument(
        "--step",
        type=int,
        help="the step of the metric; default: the first in which the condition holds",
    )
    bisect.add_argument(
        "--from",
        dest="first",
        type=int,
        metavar="STEP",
        help="the first step whose groups are suspects; default: only those of the metric's step",
    )
    _set_program(bisect, f"{_RETRAINING}:run_bisect")


def _add_folder_commands(commands: argparse._SubParsersAction[_Parser]) -> None:
    verify = commands.add_parser("verify", help="check a run by its files alone, also a copy")
    _add_folder(verify)
    _set_program(verify, "slipstream.client.verify:run_verify")

    aside = commands.add_parser(
        "set-aside", help="take the batch at which a run fails out of it, before it goes on"
    )
    _add_folder(aside)
    aside.add_argument("step", type=int, metavar="STEP", help="as the cause of the failure has it")
    aside.add_argument(
        "--group",
        dest="groups",
        action="append",
        default=[],
        metavar="GROUP",
        help="only this one, may be given again; default: all groups of the batch",
    )
    _set_program(aside, f"{_LAUNCHER}:run_set_aside")

    export = commands.add_parser(
        "export", help="a checkpoint as a Hugging Face folder, rollouts as a data set, or metrics"
    )
    _add_folder(export)
    export.add_argument("--step", type=int, help="the version; default: the newest checkpoint")
    export.add_argument("--out", type=_path, help="default: RUN/checkpoints/hf-STEP")
    export.add_argument(
        "--rollouts",
        type=_path,
        metavar="FILE",
        help="write what the model said and earned to a new .parquet or .jsonl instead",
    )
    export.add_argument(
        "--steps", type=_steps, metavar="A:B", help="only rollouts of these, both included"
    )
    export.add_argument("--min-reward", type=_reward, metavar="R", help="only with R or more")
    export.add_argument(
        "--metrics",
        metavar="TRACKER",
        help="send metrics.jsonl to wandb, tensorboard or mlflow, or write it as csv, instead",
    )
    _set_program(export, "slipstream.client.launch.rollouts:run_export_command", whole=True)


def _add_checks(commands: argparse._SubParsersAction[_Parser]) -> None:
    doctor = commands.add_parser("doctor", help="what stands in the way of a run on this machine")
    _add_settings(doctor, is_optional=True)
    doctor.add_argument("--json", action="store_true", help="one line for each finding")
    doctor.add_argument(
        "--role",
        choices=("learner", "rollout-server"),
        help="all that one instance of this role needs",
    )
    _add_node(doctor)
    doctor.add_argument("--controller", metavar="HOST:PORT", help="as of rollout-server")
    _set_program(doctor, f"{_LAUNCHER}:run_doctor", whole=True)

    check = commands.add_parser(
        "check", help="what environments would teach; proves own functions of the algorithm too"
    )
    check.add_argument("path", type=_path, metavar="CONFIG.toml|MODULE:CLASS", help="what to check")
    _add_overrides(check)
    check.add_argument("--args", metavar="JSON", help="keyword arguments of the class")
    check.add_argument("--python", metavar="PATH", help="another interpreter for the class")
    check.add_argument("--timeout-s", type=seconds, help="limit of one call to it; default: 60")
    check.add_argument(
        "--model", type=_path, metavar="FOLDER", help="whose template writes prompts"
    )
    _set_program(check, f"{_LAUNCHER}:run_check")


def _add_page(commands: argparse._SubParsersAction[_Parser]) -> None:
    page = commands.add_parser("page", help="curves and replies of runs in one file of HTML")
    _add_folder(page, name="folders", nargs="+")
    page.add_argument(
        "--out", type=_path, metavar="FILE", help="default: page.html in RUN, of several runs here"
    )
    _set_program(page, "slipstream.client.page:write_pages")


def _add_requests(commands: argparse._SubParsersAction[_Parser]) -> None:
    submit = commands.add_parser("submit", help="add an environment to a run")
    submit.add_argument("reference", metavar="MODULE:CLASS", help="where the servers find it")
    submit.add_argument(
        "--args", default="{}", metavar="JSON", help="keyword arguments of the class"
    )
    submit.add_argument("--name", help="default: the class name in lower case")
    submit.add_argument("--weight", type=float, default=1.0, help="share of the trained groups")
    submit.add_argument("--timeout-s", type=seconds, default=60.0, help="limit of a reset or step")
    submit.add_argument("--num-workers", type=int, default=1, help="processes beside each server")
    submit.add_argument("--adapter", default="", help="one of lora.adapters, if there are any")
    submit.add_argument(
        "--python", type=_path, help="interpreter of the workers; default: servers'"
    )
    _add_connection(submit, "submit")

    status = commands.add_parser("status", help="what a run is doing")
    status.add_argument("--json", action="store_true", help="everything, for programs")
    status.add_argument("--server-id", help="print nothing; exit code 1 unless this server works")
    status.add_argument(
        "--if",
        dest="changes",
        nargs="+",
        default=[],
        metavar="section.key=value",
        help="what RUN would do with these settings, by what its files have measured",
    )
    _add_connection(status, "status")

    drain = commands.add_parser("drain", help="let one rollout server leave a run in order")
    drain.add_argument("server_id", metavar="SERVER", help="its name, as slipstream status has it")
    drain.add_argument("--reason", default="a client asked for it", help="for the log")
    _add_connection(drain, "drain")

    stop = commands.add_parser("stop", help="end a run in order")
    stop.add_argument("--reason", default="a client asked for it", help="for the log")
    _add_connection(stop, "stop")


def _add_settings(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    number = "?" if is_optional else None
    parser.add_argument("path", type=_path, nargs=number, metavar="CONFIG.toml", help="settings")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    placeholder = "section.key=value"
    parser.add_argument("overrides", nargs="*", default=[], metavar=placeholder, help="a setting")


def _add_start(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    _add_settings(parser, is_optional=is_optional)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print it, start nothing; exit code 1: not possible on this machine",
    )


def _add_folder(
    parser: argparse.ArgumentParser, *, name: str = "folder", nargs: str | None = None
) -> None:
    meaning = "a run's folder, or its name in runs/"
    parser.add_argument(name, type=_folder, nargs=nargs, metavar="RUN", help=meaning)


def _folder(run: str) -> Path:
    from slipstream.client.run_folder import named_folder

    return named_folder(run)


def _path(text: str) -> Path:
    if text[:1] in ("~", "$"):
        # Otherwise a folder named "~" would be made here.
        raise argparse.ArgumentTypeError(f"a path has no ~ or $ in front, got {text}")
    return Path(text)


def _steps(text: str) -> tuple[int | None, int | None]:
    """Returns the first and the last step that an option states; None where it states none."""
    match = re.fullmatch(r"([0-9]{0,9}):([0-9]{0,9})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"steps are A:B, such as 10:20, 10: or :20, got {text}")
    first, last = (int(number) if number else None for number in match.groups())
    if first is not None and last is not None and first > last:
        raise argparse.ArgumentTypeError(f"the first of the steps comes behind the last in {text}")
    return first, last


def _reward(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"a reward is a finite number, got {text}")
    return value


def _add_node(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--node-rank",
        type=int,
        default=os.environ.get("NODE_RANK"),
        help="0: the node of the controller; default: NODE_RANK of the environment",
    )
    parser.add_argument(
        "--master",
        metavar="HOST:PORT",
        help="where the ranks of all nodes meet; default: MASTER_ADDR and MASTER_PORT",
    )


def _add_connection(parser: argparse.ArgumentParser, request: str) -> None:
    _set_program(parser, f"slipstream.client.requests:{request}", whole=True)
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="its folder, or its name in runs/; default: the only run that goes on there",
    )
    parser.add_argument(
        "--controller", metavar="HOST:PORT", help="in place of RUN: the address of its controller"
    )
    for option, what in CONNECTION_FILES.items():
        parser.add_argument(option, type=_path, metavar="FILE", help=f"{what}; default: RUN's")


def _set_program(parser: argparse.ArgumentParser, reference: str, *, whole: bool = False) -> None:
    """Makes a command call the function `reference`, written as "module:function".

    The function gets each parsed argument by its name, or if `whole` all of them as one object.
    """
    parser.set_defaults(execute=partial(_call, reference, whole))


def _call(reference: str, whole: bool, arguments: argparse.Namespace) -> Any:  # noqa: ANN401
    module, _, name = reference.partition(":")
    function = getattr(importlib.import_module(module), name)
    return function(arguments) if whole else function(**named(arguments))


def named(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the arguments of a command's function, by name."""
    return {k: v for k, v in vars(arguments).items() if k not in ("execute", "final")}


async def _run(arguments: argparse.Namespace) -> int:
    from slipstream.client.launch.launcher import run_all
    from slipstream.core.errors import ConfigError

    path = arguments.path
    overrides = list(arguments.overrides)
    if path is not None and "=" in str(path) and not path.exists():
        # Without a file the first setting stands in its place.
        path, overrides = None, [str(path), *overrides]
    if arguments.steps is not None:
        overrides.insert(0, f"run.steps={arguments.steps}")
    if arguments.environment is not None:
        overrides.insert(0, f"environments=[{{reference={json.dumps(arguments.environment)}}}]")
    if arguments.model is not None:
        overrides.insert(0, f"model.path={json.dumps(arguments.model)}")
    if path is None and not overrides:
        raise ConfigError("a run needs a CONFIG.toml, or --model, --environment and --steps")
    return await run_all(path, overrides, dry_run=arguments.dry_run)


if __name__ == "__main__":
    sys.exit(main())
