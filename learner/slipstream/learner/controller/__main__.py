"""Runs the controller: `python -m slipstream.learner.controller --config FILE`."""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from pathlib import Path

import uvloop
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import FAILED, USAGE_ERROR, RunFailed, SlipstreamError
from slipstream.core.logs import use_format

FORM = "%(asctime)s %(levelname)s %(message)s"


class DescriptorLog(logging.Handler):
    """A log handler that writes each line to a file descriptor unbuffered.

    A line that cannot be written, for example on a full disk, is lost without an error.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORM))
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        write_line(self._descriptor, self.format(record))


def write_line(descriptor: int, text: str) -> None:
    """Writes a line unbuffered, ignoring errors: a full buffer would change the exit code."""
    data = f"{text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def main() -> int:
    """Runs one controller; returns 0 after success, 1 after a failed run, 2 for wrong settings."""
    parser = argparse.ArgumentParser(prog="slipstream-controller", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, handlers=[DescriptorLog(sys.stderr.fileno())])
    try:
        return uvloop.run(_serve(arguments.config, arguments.overrides))
    except RunFailed as error:
        _last_words(error)
        return FAILED
    except (SlipstreamError, FileExistsError) as error:
        _last_words(error)
        return USAGE_ERROR
    except BaseExceptionGroup as group:
        ours = group.subgroup(SlipstreamError)
        if ours is None:
            raise
        _last_words(_first(ours))
        return FAILED


def _last_words(error: BaseException) -> None:
    write_line(sys.stderr.fileno(), f"slipstream: {error}")


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _serve(path: Path, overrides: list[str]) -> int:
    from slipstream.core.settings.measurement_sections import check_trackers
    from slipstream.learner.algorithms.functions import load_functions
    from slipstream.learner.controller.application import Controller
    from slipstream.protocol.access.run_token import make_run_token, run_credentials

    config = load_config(path, overrides)
    use_format(config, "controller")
    check_trackers(config.tracking)
    load_functions(config, ("reward", "filter"))
    make_run_token(config)
    controller = Controller(config, run_credentials(config))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, controller.stop, f"signal {number.name}")
    # Imported objects stay for the whole process: a full garbage collection over them would hold
    # the event loop for 70 ms and more.
    gc.collect()
    gc.freeze()
    return await controller.run()


if __name__ == "__main__":
    sys.exit(main())
