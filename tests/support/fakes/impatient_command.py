"""The `slipstream` command, which soon ends a controller that stands still."""

from slipstream.client import cli
from slipstream.client.launch import run_processes

SILENT_LIMIT_S = 20.0


def main() -> int:
    """Runs the command with deadlines of seconds in place of a minute."""
    run_processes.ANSWER_LIMIT_S = 2.0
    run_processes.LOOK_S = 0.5
    run_processes.ALIVE_PERIOD_S = 0.5
    run_processes.SILENT_LIMIT_S = SILENT_LIMIT_S
    return cli.main()
