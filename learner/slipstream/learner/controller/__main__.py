"""Runs the controller: `python -m slipstream.learner.controller --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from pathlib import Path

import uvloop
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import RunFailed, SlipstreamError
from slipstream.core.exit_codes import FAILED, USAGE_ERROR

FORM = "%(asctime)s %(levelname)s %(message)s"


class OwnLog(logging.Handler):
    """Writes each line at once; counts lines that the disk refuses and logs their number later."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORM))
        self._descriptor = descriptor
        self._num_lost = 0
        self._cause = ""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        text = self.format(record)
        if self._num_lost:
            told = f"{self._num_lost} lines of this log were lost: {self._cause}"
            facts = {"levelname": "WARNING", "levelno": logging.WARNING, "msg": told}
            lost = logging.makeLogRecord({"name": record.name, **facts})
            # The newline ends the line before, which may have been torn.
            text = f"\n{self.format(lost)}\n{text}"
        try:
            _write(self._descriptor, f"{text}\n".encode(errors="backslashreplace"))
            self._num_lost = 0
        except OSError as error:
            self._num_lost += 1
            self._cause = error.strerror or type(error).__name__


def last_words(text: str) -> None:
    """Writes on standard error why the process ends; ignores a full disk."""
    try:
        _write(sys.stderr.fileno(), f"slipstream: {text}\n".encode(errors="backslashreplace"))
    except OSError:
        return


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> int:
    """Runs one controller; exit code 2 for a configuration that cannot work, 1 for a failed run."""
    parser = argparse.ArgumentParser(prog="slipstream-controller", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, handlers=[OwnLog(sys.stderr.fileno())])
    try:
        return uvloop.run(_serve(arguments.config))
    except RunFailed as error:
        last_words(str(error))
        return FAILED
    except (SlipstreamError, FileExistsError) as error:
        last_words(str(error))
        return USAGE_ERROR
    except BaseExceptionGroup as group:
        ours = group.subgroup(SlipstreamError)
        if ours is None:
            raise
        last_words(str(_first(ours)))
        return FAILED


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _serve(path: Path) -> int:
    from slipstream.core.settings.tracking import check_trackers
    from slipstream.learner.controller.application import Controller
    from slipstream.protocol.access.security import Credentials

    config = load_config(path)
    check_trackers(config.tracking)
    controller = Controller(config, Credentials.load(config.security))
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
