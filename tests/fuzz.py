"""Says a million messages to a live controller, and gives its readers a million files.

    python tests/fuzz.py --seconds 3600 --folder /tmp/fuzz

A real controller trains with an honest rollout server and trainer while this program calls it with
`tests/support/rigs/fuzz_calls.py`, and reads with `fuzz_readers.py` and `fuzz_files.py` beside it.
An honest client asks for the status meanwhile. It ends with a table, and 1 if a rule was broken:
an answer that callers do not know, more than one line, a traceback, or an honest peer that ends.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import grpc.aio  # noqa: E402
from slipstream.client.run_folder import write_config  # noqa: E402
from support.rigs.controller_runs import make_config  # noqa: E402
from support.rigs.counted_work import counted  # noqa: E402
from support.rigs.fuzz_calls import FATAL, METHODS, Answers, answered, random_case  # noqa: E402
from support.rigs.fuzz_files import file_readers  # noqa: E402
from support.rigs.fuzz_readers import MOST_LINES, Reader, message_readers, request_readers, sample  # noqa: E402
from support.rigs.fuzz_results import result_readers  # noqa: E402

CALLS = tuple(name for name in METHODS if name not in FATAL)
CALLERS, READINGS_A_TURN, TELL_S = 32, 32, 60.0
# What ends the loop of a controller that is stopped is no fault of what it was told.
TRACEBACK = "Traceback (most recent call last)"


class Readings:
    """What the readers did."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._folder, self._draw = folder, draw
        readers = (request_readers, message_readers, file_readers, result_readers)
        self._readers = [reader for some in readers for reader in some()]
        self.counts: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()

    def some(self, number: int) -> None:
        """Gives random bytes to random readers, `number` times."""
        for _ in range(number):
            self.one()

    def one(self) -> None:
        """Gives random bytes to a random reader."""
        reader = self._draw.choice(self._readers)
        data = sample(reader, self._draw)
        with counted() as work:
            try:
                reader.read(data, self._folder)
                self.counts["accepted"] += 1
            except reader.errors as error:
                self.counts["refused"] += 1
                if "\n" in str(error):
                    self._break(reader, data, f"more than one line: {str(error)!r}")
            except Exception as error:  # noqa: BLE001 - what a reader must not raise
                self._break(reader, data, f"{type(error).__name__}: {str(error)[:200]}")
        if work.num_lines > MOST_LINES:
            self._break(reader, data, f"{work.num_lines} lines of Python")

    def _break(self, reader: Reader, data: bytes, what: str) -> None:
        if not self.broken[f"{reader.name}: {what}"]:
            number = len(self.broken)
            (self._folder / f"broken-{number}.bin").write_bytes(data)
        self.broken[f"{reader.name}: {what}"] += 1


async def call(channel: grpc.aio.Channel, draw: random.Random, answers: Answers) -> None:
    """Makes calls for ever, one after the other."""
    while True:
        case = random_case(draw, CALLS)
        answers.note(case, *await answered(channel, case), also=("RESOURCE_EXHAUSTED",))


async def fuzz(arguments: argparse.Namespace, address: str) -> tuple[Answers, Readings, float]:
    """Calls and readings until the time is over, or the run."""
    answers, told_s = Answers(), 0.0
    readings = Readings(arguments.folder / "files", random.Random(f"{arguments.seed}/files"))
    async with grpc.aio.insecure_channel(address) as channel:
        async with asyncio.timeout(60):
            await channel.channel_ready()
        begun_s = time.monotonic()
        callers = [
            asyncio.create_task(call(channel, random.Random(f"{arguments.seed}/{n}"), answers))
            for n in range(CALLERS)
        ]
        while (passed_s := time.monotonic() - begun_s) < arguments.seconds:
            # Readings keep pace with messages: the processor is shared with the controller.
            due = int(arguments.readings_a_message * answers.messages) - readings.counts.total()
            # In a thread: some readers run a loop of their own.
            await asyncio.to_thread(readings.some, min(due, READINGS_A_TURN))
            await asyncio.sleep(0.001)
            if any(caller.done() for caller in callers) or arguments.peers.poll() is not None:
                break
            if passed_s > told_s + TELL_S:
                told_s = passed_s
                line = (round(passed_s), answers.messages, readings.counts.total())
                print(*line, len(answers.broken), dict(readings.broken), flush=True)
        for caller in callers:
            if caller.done():
                error = None if caller.cancelled() else caller.exception()
                answers.broken.append(f"a caller ended: {error or 'it was cancelled'!r}")
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    return answers, readings, time.monotonic() - begun_s


def table(arguments: argparse.Namespace, answers: Answers, readings: Readings, s: float) -> int:
    """Prints what was seen; the number of broken rules."""
    folder = arguments.folder
    log = (folder / "controller.log").read_text(errors="replace")
    beats = [json.loads(line) for line in (folder / "beats.jsonl").read_text().splitlines()]
    latencies = [line.split() for line in (folder / "latencies.txt").read_text().splitlines()]
    waits_ms = sorted(1000 * float(wait) for wait, _ in latencies)
    held_ms = sorted(beat["held_ms"] for beat in beats)
    total = answers.messages + readings.counts.total()
    print(f"messages {answers.messages:,}, readings {readings.counts.total():,}, all {total:,}")
    print(f"seconds {s:,.0f}; steps trained meanwhile {latencies[-1][1] if latencies else 0}")
    for name, count in sorted(answers.codes.items()):
        print(f"  {name}: {count:,}")
    print(f"  readings: {dict(readings.counts)}")
    if waits_ms:
        at = [waits_ms[int(share * (len(waits_ms) - 1))] for share in (0.5, 0.99, 1.0)]
        print("status, ms: p50 {:.1f}, p99 {:.1f}, max {:.1f}".format(*at))
    if held_ms:
        print(
            f"loop held, ms of processor: median of maxima {held_ms[len(held_ms) // 2]}, ", end=""
        )
        print(f"max {held_ms[-1]}, longer than 50 ms {sum(beat['num_long'] for beat in beats)}")
        shown = beats[:: max(1, len(beats) // 12)]
        print("resident MB:", *(f"{b['s']:.0f}s {b['rss_bytes'] / 1e6:.0f}" for b in shown))
        print(f"processor of the controller, s: {beats[-1]['cpu_s']}")
    faults = [*Counter(answers.broken).most_common(), *readings.broken.most_common()]
    faults += [("tracebacks in the log", log.count(TRACEBACK))] * (TRACEBACK in log)
    if arguments.peers.poll() is not None:
        faults.append(((folder / "peers.log").read_text()[-2000:], 1))
    for what, count in faults:
        print(f"BROKEN {count} times: {what[:2000]}")
    return len(faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--folder", type=Path, required=True, help="for logs and what was broken")
    parser.add_argument("--readings-a-message", type=float, default=1.0)
    arguments = parser.parse_args()
    # Readers of damaged files log what they find; the table has it.
    logging.disable(logging.CRITICAL)
    (arguments.folder / "files").mkdir(parents=True)
    config = make_config(arguments.folder, run__steps=10**6)
    path, fakes = write_config(config, arguments.folder), ROOT / "tests" / "support" / "fakes"
    with (
        (arguments.folder / "controller.log").open("wb") as log,
        (arguments.folder / "peers.log").open("wb") as peers_log,
        subprocess.Popen(
            [
                sys.executable,
                fakes / "watched_controller.py",
                path,
                arguments.folder / "beats.jsonl",
            ],
            stdout=log,
            stderr=log,
        ) as controller,
    ):
        address, latencies = config.controller.address, arguments.folder / "latencies.txt"
        arguments.peers = subprocess.Popen(
            [sys.executable, fakes / "honest_peers.py", address, latencies],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=peers_log,
            stderr=peers_log,
        )
        try:
            found = asyncio.run(fuzz(arguments, address))
            return 1 if table(arguments, *found) else 0
        finally:
            for process in (arguments.peers, controller):
                # The controller's peers are gone: if it were asked to end it would wait for them.
                process.kill()
                process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
