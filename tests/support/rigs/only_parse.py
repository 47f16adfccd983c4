"""Lets programs read their command lines and do nothing else.

    echo '[["-m", "benchmarks.weights.broadcast"]]' | python tests/support/rigs/only_parse.py

Prints one JSON line for each command: the complaint of its own parser, or "" when it takes all.
"""

import argparse
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path


class Parsed(BaseException):
    """The program has read its command line."""


_parse_args = argparse.ArgumentParser.parse_args


def parse_and_stop(
    parser: argparse.ArgumentParser, *arguments: object
) -> argparse.Namespace:
    """In place of `parse_args` of every parser."""
    _parse_args(parser, *arguments)  # type: ignore[call-overload]
    raise Parsed


def complaint(command: list[str]) -> str:
    """What the program of a command has against its arguments."""
    text = io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(text),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            if command[0] == "-m":
                sys.argv = command[1:]
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = command
                sys.path.insert(0, str(Path(command[0]).parent))
                runpy.run_path(command[0], run_name="__main__")
    except Parsed:
        return ""
    except SystemExit as end:
        return text.getvalue().strip() or f"it ended with {end.code}"
    return "it reads no command line"


if __name__ == "__main__":
    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[method-assign,assignment]
    for each in json.load(sys.stdin):
        print(json.dumps(complaint(each)), flush=True)
