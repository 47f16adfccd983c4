"""Plays simulated runs: `python tests/simulation/run.py --seeds 0:1000 --processes 2`.

Prints each seed that breaks a rule, with the command that plays it again, and the sums in a line of
JSON at the end; the exit code is 1 if any did.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from simulation.stand_ins import stand_in  # noqa: E402

stand_in()

from simulation.world import Result, World, shared_memory  # noqa: E402

KINDS = ("schedules", "steps", "mixed batches", "trajectories", "tokens")
# Longest time of one schedule, which usually takes less than a second.
SCHEDULE_S = 120.0


def seeds_of(text: str) -> range:
    """The seeds FIRST:END, without END; END alone begins at 0."""
    first, _, end = text.rpartition(":")
    return range(int(first or 0), int(end))


@dataclass
class _Part:
    """A process that plays some of the seeds."""

    process: BaseProcess
    # Seeds whose result has not come.
    seeds: range
    heard_s: float


class Schedules:
    """Plays seeds in processes; one that hangs or ends is replaced, and its seed has failed."""

    def __init__(
        self, folder: Path, *, until_s: float = float("inf"), verbose: bool
    ) -> None:
        self._folder = folder
        self._until_s = until_s
        self._verbose = verbose
        self._context = multiprocessing.get_context("fork")
        self._parts: dict[Connection, _Part] = {}

    def play(self, seeds: range, num_processes: int) -> Iterator[Result]:
        for part in range(num_processes):
            self._start(seeds[part::num_processes])
        while self._parts:
            for connection in wait(list(self._parts), timeout=1.0):
                assert isinstance(connection, Connection)
                part = self._parts[connection]
                try:
                    result = connection.recv()
                except EOFError:
                    yield from self._ended(connection)
                    continue
                part.seeds, part.heard_s = part.seeds[1:], time.monotonic()
                yield result
            for part in self._parts.values():
                if time.monotonic() - part.heard_s > SCHEDULE_S:
                    part.process.kill()

    def _start(self, seeds: range) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=self._play_part, args=(seeds, theirs), daemon=True
        )
        process.start()
        theirs.close()
        self._parts[ours] = _Part(process, seeds, time.monotonic())

    def _play_part(self, seeds: range, connection: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        folder = self._folder / str(os.getpid())
        for seed in seeds:
            if time.monotonic() > self._until_s:
                break
            try:
                result = World(seed, folder, verbose=self._verbose).run()
            except Exception as error:  # noqa: BLE001 - the seed has failed
                result = _failed(
                    seed, f"the rig failed: {type(error).__name__}: {error}"
                )
            connection.send(result)

    def _ended(self, connection: Connection) -> Iterator[Result]:
        part = self._parts.pop(connection)
        part.process.join()
        if part.process.exitcode != 0:
            yield _failed(
                part.seeds[0], f"its process ended with {part.process.exitcode}"
            )
            self._start(part.seeds[1:])


def _failed(seed: int, cause: str) -> Result:
    return Result(seed, [cause], "", Counter(), 0.0, Counter())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", type=seeds_of, default="0:1000", help="[FIRST:]END, without END"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="seconds to begin in"
    )
    parser.add_argument("--verbose", action="store_true", help="print each message")
    arguments = parser.parse_args()
    seeds = arguments.seeds
    begun_s = time.monotonic()
    sums: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    failed = []
    virtual_s = 0.0
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        until_s = begun_s + arguments.limit_s
        schedules = Schedules(Path(folder), until_s=until_s, verbose=arguments.verbose)
        for result in schedules.play(seeds, min(arguments.processes, len(seeds))):
            sums += Counter(schedules=1) + result.trained
            fired += result.fired
            virtual_s += result.virtual_s
            if result.violations:
                failed.append(result.seed)
                print(f"seed {result.seed}: {result.violations[0]}")
                for other in result.violations[1:5]:
                    print(f"    {other}")
                again = f"--seeds {result.seed}:{result.seed + 1}"
                print(f"    python tests/simulation/run.py {again}", flush=True)
    violations = {
        "seeds": len(seeds),
        **{kind: sums[kind] for kind in KINDS},
        "fired": dict(fired.most_common()),
        "faults": fired.total(),
        "failed": sorted(failed),
        "virtual_hours": round(virtual_s / 3600, 2),
        "seconds": round(time.monotonic() - begun_s, 1),
    }
    print(json.dumps(violations))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
