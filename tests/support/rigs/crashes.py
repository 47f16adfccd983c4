"""A process that dies just before one of its changes of names on the disk."""

import itertools
import os
import sys
from collections.abc import Callable


def crashing_at(change: int, act: Callable[[], object]) -> bool:
    """Runs `act` in a process that dies just before its n-th change of a name; whether it ended."""
    pid = os.fork()
    if pid == 0:
        changes = itertools.count()

        def die(event: str, _: object) -> None:
            if (
                event in ("os.rename", "os.remove", "os.rmdir")
                and next(changes) == change
            ):
                os._exit(9)

        try:
            sys.addaudithook(die)
            act()
        except BaseException:  # noqa: BLE001
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 0
