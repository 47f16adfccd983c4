"""A fork server: imports a program's modules once, then forks a process for each order.

`python -m slipstream.core.machine.fork_server ROOM` reads lines of JSON from stdin. The first line,
`[MODULE, ARGUMENTS...]`, names the program. The server calls `MODULE.preload.preload(arguments)`,
which only imports modules, and opens no file or port. Each further line, `{"name", "log",
"environ"}`, orders a process. The new process writes `{"pid"}` to stdout; when the process has
ended, the server writes `{"pid", "code"}`.

A process is a child of the server, and is killed when the server ends. It leads a session of its
own, writes to `log`, and runs MODULE as `python -m MODULE` does. `ROOM` is a text without meaning
that makes the server's command line long enough: each process overwrites its copy of that line with
its own (`show_as`). The server serves orders and reports ended processes until stdin ends.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import sys
import time
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from slipstream.core.machine.descendants import kill_orphans
from slipstream.core.machine.process import become_reaper, die_with_parent, flush_output

# Seconds within which the orphans of a dead process end and give their GPU memory back.
LEFT_LIMIT_S = 10.0
_LOOK_S = 0.01


def main() -> None:
    """Serves orders; in each forked process, runs the program. The server itself never returns."""
    answers = os.dup(1)
    # Output of imports must not look like an answer.
    os.dup2(2, 1)
    orders = FileIO(0, closefd=False)
    module, *arguments = json.loads(orders.readline())
    importlib.import_module(f"{module}.preload").preload(arguments)
    become_reaper()
    gc.freeze()
    server = os.getpid()
    order = _serve(orders, answers)
    _become(order, [sys.executable, "-m", module, *arguments], server, answers)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def show_as(name: str, words: Sequence[str]) -> None:
    """Sets this process's name, and overwrites its command line with as much of `words` as fits.

    `words` begin with Python, "-m" and a module. All further words are joined into one, which keeps
    the number of words: setproctitle, by which vLLM names its engine, counts them.
    """
    Path("/proc/self/comm").write_text(name[:15])
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, room = int(fields[45]), int(fields[46]) - int(fields[45]) - 1
    line = os.fsencode("\0".join([*words[:3], " ".join(words[3:])]))
    ctypes.memmove(start, line[:room].ljust(room) + b"\0", room + 1)


def _serve(orders: FileIO, answers: int) -> dict[str, Any]:
    """Forks a process for each order. Only the forked processes return, each with its order."""
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    running: dict[int, int] = {}
    while True:
        for ready, _ in poll.poll():
            if ready != orders.fileno():
                poll.unregister(ready)
                os.close(ready)
                pid = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _answer(answers, pid=pid, code=code)
                continue
            order = orders.readline()
            if not order:
                # The processes end with this one.
                os._exit(0)
            _end_left(running.values())
            flush_output()
            pid = os.fork()
            if not pid:
                for handle in running:
                    os.close(handle)
                return dict(json.loads(order))
            handle = os.pidfd_open(pid)
            running[handle] = pid
            poll.register(handle, select.POLLIN)


def _answer(answers: int, **fields: int) -> None:
    os.write(answers, json.dumps(fields).encode() + b"\n")


def _end_left(running: Iterable[int]) -> None:
    """Kills orphans of ended processes, since they would hold memory that the next process needs.

    Blocks for up to `LEFT_LIMIT_S` seconds. The processes with the pids `running` are spared.
    """
    until_s, own = time.monotonic() + LEFT_LIMIT_S, set(running)
    while kill_orphans(own) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)


def _become(order: dict[str, Any], words: Sequence[str], server: int, answers: int) -> None:
    die_with_parent()
    if os.getppid() != server:
        os._exit(1)
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(order["environ"])
    with contextlib.suppress(OSError):
        show_as(order["name"], words)
    # A signal to the group reaches the process from here on.
    _answer(answers, pid=os.getpid())
    for each in (nothing, log, answers):
        os.close(each)


if __name__ == "__main__":
    main()
