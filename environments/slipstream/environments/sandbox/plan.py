"""Limits and paths of a program in a sandbox."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

Backend: TypeAlias = Literal["sandlock", "bubblewrap"]


@dataclass(frozen=True)
class Limits:
    """Limits of a program and of all processes that it starts.

    `seconds` limits the wall-clock time. `processor_s`, `open_files` and `file_bytes` hold for each
    process. `folder_bytes` limits the files on the disk. A removed file that is still open does not
    count, so each process can hold up to `file_bytes` more in each of its `open_files`.
    `output_bytes` holds for stdout and for stderr. `threads` counts those of all processes, each of
    which has at least one.
    """

    seconds: float = 10.0
    processor_s: int = 10
    memory_bytes: int = 512 << 20
    processes: int = 16
    # Libraries of numbers start one for each core in each process.
    threads: int = 256
    open_files: int = 64
    file_bytes: int = 16 << 20
    folder_bytes: int = 64 << 20
    folder_files: int = 10_000
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Plan:
    """The instructions for a launcher, which runs one program in a sandbox.

    The program may write below `folder`. It starts in `cwd`, or in `folder` if `cwd` is "". It may
    connect to `port` of 127.0.0.1, or to no address if `port` is 0; only sandlock can allow a port.
    If the program exceeds a limit, the launcher writes the limit to `cause_fd`. Root may give the
    program, with `folder`, an account of its own if `may_change_account`.
    """

    backend: Backend
    folder: str
    readable: Sequence[str]
    limits: Limits
    cause_fd: int
    cwd: str = ""
    port: int = 0
    may_change_account: bool = False

    @staticmethod
    def of(text: str) -> "Plan":
        """Returns the plan in the JSON that `Plan.text` returned."""
        table = json.loads(text)
        return Plan(**table | {"limits": Limits(**table["limits"])})

    def text(self) -> str:
        """Returns the plan as JSON."""
        return json.dumps(asdict(self))
