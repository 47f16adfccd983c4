"""Runs a program of this project, and notes when some of its calls begin and end.

    python -m benchmarks.controller.timeline FILE ROLE --config ...

Produces: a line `NAME SECONDS` in FILE for each moment of ROLE (`front`, `controller` or
`trainer`), on the machine's monotonic clock, which all programs share. `Steps` reads them as the
parts of a client's steps.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TINKER = "slipstream.extensions.tinker"
_LEARNER = "slipstream.learner"
_CONTROLLER = f"{_LEARNER}.controller"
_TRAINER = f"{_LEARNER}.trainer"
# The module that each role runs, and what is noted there: where a function lies, and its name.
MAINS = {
    "front": f"{_TINKER}.front",
    "controller": f"{_CONTROLLER}.__main__",
    "trainer": f"{_TRAINER}.__main__",
}
CALLS = {
    "front": (
        (f"{_TINKER}.bodies", "HeldBody.read", "body"),
        (f"{_TINKER}.front", "forward_backward", "parse"),
    ),
    "controller": (
        (f"{_TINKER}.service", "OperationServicer._add", "submit"),
        (f"{_TINKER}.operation_store", "OperationStore.write", "store"),
        (f"{_TINKER}.operation_store", "OperationStore.end", "result"),
        (f"{_TINKER}.controller", "Operations.order", "order"),
        (f"{_TINKER}.controller", "Operations.computed", "computed"),
        (f"{_TINKER}.controller", "Operations.next_step", "turn"),
        (f"{_TINKER}.controller", "Operations.stepped", "stepped"),
        (f"{_CONTROLLER}.records.journal", "Journal.write_batch", "batch"),
        (f"{_CONTROLLER}.loop", "BatchFormer._write", "formed"),
    ),
    "trainer": (
        (f"{_TRAINER}.passes", "Passes.compute", "pass"),
        (f"{_TRAINER}.passes", "Passes.run", "update"),
        (f"{_TRAINER}.train", "Trainer._export", "export"),
        (f"{_TRAINER}.controller_client", "ControllerClient.report_pass", "told"),
        (f"{_TRAINER}.controller_client", "ControllerClient.report_step", "reported"),
        (f"{_TRAINER}.controller_client", "ControllerClient.next", "next"),
    ),
}
# The parts of a step, in their order: the moment at which each ends, and what it is.
PARTS = (
    ("body.end", "the client sends, the HTTP process receives", "carried"),
    ("parse.end", "the HTTP process reads the pass", "work"),
    ("submit.begin", "the operation goes to the controller", "carried"),
    ("store.end", "it is written to the disk", "disk"),
    ("pass.begin", "the trainer is woken and gets it", "carried"),
    ("pass.end", "the pass", "pass"),
    ("computed.begin", "its report goes to the controller", "carried"),
    ("turn.end", "the step has its turn", "carried"),
    ("formed.end", "its passes, and the result of the last, are in the journal", "disk"),
    ("update.begin", "the trainer gets them", "carried"),
    ("update.end", "the optimizer's step", "step"),
    ("export.end", "the digests of the new weights", "step"),
    ("stepped.end", "the step is reported", "carried"),
    ("result.end", "its result is written to the disk", "disk"),
    ("answered", "the client has it", "carried"),
)


class Moments:
    """A file of moments, each of which is written at once."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, name: str) -> None:
        os.write(self._file, f"{name} {time.monotonic():.6f}\n".encode())

    def watch(self, module: str, path: str, name: str) -> None:
        """Notes beginning and end of a function, which has an end only if it gives something."""
        *within, last = path.split(".")
        place = functools.reduce(getattr, within, importlib.import_module(module))
        setattr(place, last, self._noted(getattr(place, last), name))

    def _noted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:  # noqa: ANN401
            self.note(f"{name}.begin")
            result = function(*args, **named)
            if result is not None or name not in ("order", "turn"):
                self.note(f"{name}.end")
            return result

        @functools.wraps(function)
        async def wait(*args: Any, **named: Any) -> Any:  # noqa: ANN401
            self.note(f"{name}.begin")
            result = await function(*args, **named)
            self.note(f"{name}.end")
            return result

        return wait if inspect.iscoroutinefunction(function) else call


def read(folder: Path) -> list[tuple[float, str]]:
    """Returns the moments of all files of a folder, in their order."""
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines()]
    return sorted((float(line.split()[1]), line.split()[0]) for line in lines)


def parts(moments: list[tuple[float, str]], begun_s: float, ended_s: float) -> list[float]:
    """Returns the seconds of each of `PARTS` of the step that a client began and saw end.

    A part that another process ended before the part in front of it has none.
    """
    last_s = begun_s
    took_s = []
    for wanted, _, _ in PARTS[:-1]:
        later = (at_s for at_s, name in moments if name == wanted and at_s >= last_s)
        at_s = next(later, last_s)
        took_s.append(at_s - last_s)
        last_s = at_s
    return [*took_s, ended_s - last_s]


def main() -> int:
    file, role, *sys.argv[1:] = sys.argv[1:]
    moments = Moments(Path(file))
    module = importlib.import_module(MAINS[role])

    def watch() -> None:
        for call in CALLS[role]:
            moments.watch(*call)

    if role == "trainer":
        # What a rank imports is patched first.
        preload = module.preload
        module.preload = lambda: (preload(), watch())
    else:
        watch()
    code: int = module.main()
    return code


if __name__ == "__main__":
    from slipstream.core.machine.process import leave

    leave(main())
