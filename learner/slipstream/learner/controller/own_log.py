"""The log of the controller, for disks that may be full."""

from __future__ import annotations

import logging
import os
import sys

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
