"""Checks that a run's controller answers, or that one of its rollout servers works.

`python -m slipstream.client.health --controller HOST:PORT [--server-id NAME]` gives the result as
an exit code, for the health checks of containers.
"""

import argparse
import asyncio
import sys

from slipstream.client.cli import add_secrets
from slipstream.client.requests import connect
from slipstream.client.status import RunStatus
from slipstream.client.terminal import plain
from slipstream.core.errors import SlipstreamError

WORKING = ("loading", "serving", "draining")


def find_fault(run: RunStatus, server_id: str | None) -> str | None:
    """Returns what is wrong with server `server_id`, or with the run, or None if nothing is."""
    if run.state == "failed":
        return f"run {run.run_id} failed: {run.cause}"
    if server_id is None:
        return None
    states = [server.state for server in run.servers if server.server_id == server_id]
    if not states:
        return f"the controller does not know rollout server {server_id}"
    # A server that came back has an entry for each of its epochs.
    if not set(states) & set(WORKING):
        verb = "has" if states[-1] == "left" else "is"
        return f"rollout server {server_id} {verb} {states[-1]}"
    return None


async def check(arguments: argparse.Namespace) -> str | None:
    """Asks the controller; raises SlipstreamError if it does not answer."""
    async with connect(arguments) as client:
        return find_fault(await client.status(), arguments.server_id)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the program's arguments."""
    parser = argparse.ArgumentParser(prog="slipstream-health", description=__doc__)
    parser.add_argument("--controller", required=True, metavar="HOST:PORT")
    add_secrets(parser)
    parser.add_argument("--server-id", help="default: only the controller")
    return parser


def main() -> int:
    """Returns 0 if all is healthy; prints the cause and returns 1 otherwise."""
    try:
        fault = asyncio.run(check(parser().parse_args()))
    except SlipstreamError as error:
        fault = str(error)
    if fault is not None:
        print(plain(fault), file=sys.stderr)
    return 0 if fault is None else 1


if __name__ == "__main__":
    sys.exit(main())
