"""The controller's program with a beat in its loop: how much processor time no beat could pass.

    python tests/support/fakes/watched_controller.py CONFIG BEATS

Each line of BEATS is a JSON object: seconds since the start, resident bytes, the largest processor
time of the loop's thread between two beats of the last seconds, and how many were above 50 ms.
Processor time, not the clock: others may take the machine meanwhile.
"""

import asyncio
import gc
import json
import os
import sys
import time
from pathlib import Path

from slipstream.learner.controller import __main__ as program

BEAT_S, LINE_S, LONG_S = 0.002, 5.0, 0.05


class Collections:
    """How long the collector of garbage has held the program, in processor time."""

    def __init__(self) -> None:
        self.longest_s = self._begun_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        now_s = time.thread_time()
        if phase == "start":
            self._begun_s = now_s
        else:
            self.longest_s = max(self.longest_s, now_s - self._begun_s)


async def beat(path: Path) -> None:
    started_s = told_s = time.monotonic()
    collections = Collections()
    longest_s, num_long, before_s = 0.0, 0, time.thread_time()
    with path.open("a", buffering=1) as file:
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = time.thread_time()
            held_s, before_s = now_s - before_s, now_s
            longest_s, num_long = max(longest_s, held_s), num_long + (held_s > LONG_S)
            if time.monotonic() - told_s > LINE_S:
                told_s = time.monotonic()
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                line = {
                    "s": round(told_s - started_s, 1),
                    "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
                    "held_ms": round(1000 * longest_s, 1),
                    "num_long": num_long,
                    "collected_ms": round(1000 * collections.longest_s, 1),
                    "cpu_s": round(time.process_time(), 1),
                }
                file.write(json.dumps(line) + "\n")
                longest_s, num_long, collections.longest_s = 0.0, 0, 0.0


def main() -> int:
    """The program's own main, with the beat beside what it serves."""
    config, beats = sys.argv[1:]
    own = program._serve

    async def serve(path: Path) -> int:
        beating = asyncio.create_task(beat(Path(beats)))
        try:
            return await own(path)
        finally:
            beating.cancel()

    program._serve = serve
    sys.argv[1:] = ["--config", config]
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
