"""Runs tests again and again where they may depend on when they look, and on what ran before them.

`python tests/steady.py tests/unit/protocol --times 20 --load 2 --one-core --delays` prints the seed
of each red run, which `--seed` repeats. A run has the order of files and tests, a folder for
temporary files, umask, time zone and locale of its seed. What is given behind `--` is pytest's.
`--stops` costs no work, and is what a busy machine does: now and then a process gets no time.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

UMASKS = (0o022, 0o077)
ZONES = ("UTC", "Asia/Kathmandu", "Pacific/Kiritimati", "America/St_Johns")
LOCALES = ("C", "C.UTF-8", "tr_TR.UTF-8")
WITHOUT_IPV6 = (
    'ip link set lo up; sysctl -qw net.ipv6.conf.all.disable_ipv6=1; exec "$0" "$@"'
)
# Of so many callbacks of an event loop one is late, by at most so long.
LATE_ONE_OF = 20
LATE_S = 0.02
# A process stands still for at most so long, after a pause of at most as long.
STOP_S = 1.0


class Shuffled:
    """A plugin of pytest: files in another order, and the tests of each."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = list(dict.fromkeys(item.path for item in items))
        place = {path: self._rng.random() for path in files}
        items.sort(key=lambda item: (place[item.path], self._rng.random()))


def delay_callbacks(rng: random.Random) -> None:
    """Some callbacks of every event loop come late, and so does what sleeps for no time."""
    run = asyncio.Handle._run
    sleep = asyncio.sleep

    def late(handle: asyncio.Handle) -> None:
        if rng.randrange(LATE_ONE_OF) == 0:
            time.sleep(rng.uniform(0.0, LATE_S))
        run(handle)

    @functools.wraps(sleep)
    async def slow(delay: float, result: object = None) -> object:
        return await sleep(delay or rng.choice((0.0, rng.uniform(0.0, LATE_S))), result)

    asyncio.Handle._run = late
    asyncio.sleep = slow


def run_once(seed: int, arguments: list[str], *, delays: bool) -> int:
    rng = random.Random(seed)
    os.umask(rng.choice(UMASKS))
    os.environ |= {"TZ": rng.choice(ZONES), "LC_ALL": rng.choice(LOCALES)}
    time.tzset()
    if delays:
        delay_callbacks(random.Random(seed))
    with tempfile.TemporaryDirectory(prefix=f"run-{seed}-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        marks = [
            "-m",
            "not slow and not gpu",
            "-q",
            "--durations=0",
            "-p",
            "no:cacheprovider",
        ]
        return pytest.main([*marks, *arguments], plugins=[Shuffled(rng)])


@contextlib.contextmanager
def stopping(pid: int, rng: random.Random) -> Iterator[None]:
    """The process, or one that it started, stands still for a while, again and again."""
    is_over = threading.Event()
    root = psutil.Process(pid)

    def stop() -> None:
        while not is_over.wait(rng.uniform(0.0, STOP_S)):
            with contextlib.suppress(psutil.Error):
                victim = rng.choice([root, root, *root.children(recursive=True)])
                # A test has stopped it otherwise.
                if victim.status() != psutil.STATUS_STOPPED:
                    victim.send_signal(signal.SIGSTOP)
                    time.sleep(rng.uniform(0.0, STOP_S))
                    victim.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def prepare(options: argparse.Namespace) -> Callable[[], None]:
    def in_the_child() -> None:
        if options.one_core:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    return in_the_child


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="+", help="files and folders")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--load", type=int, default=0, help="busy loops beside it")
    parser.add_argument(
        "--one-core", action="store_true", help="for all that the tests start, too"
    )
    parser.add_argument(
        "--delays", action="store_true", help="callbacks of event loops come late"
    )
    parser.add_argument(
        "--stops", action="store_true", help="processes stand still for moments"
    )
    parser.add_argument("--no-ipv6", action="store_true", help="needs root")
    parser.add_argument("--user", help="such as nobody; whoever starts it must be root")
    parser.add_argument("--once", action="store_true", help="in this process")
    options, options_of_pytest = parser.parse_known_args()
    tests = [*options.tests, *(other for other in options_of_pytest if other != "--")]
    if options.once:
        return run_once(options.seed, tests, delays=options.delays)
    # A network of its own, since the setting is the whole machine's otherwise.
    alone = ["unshare", "--net", "sh", "-c", WITHOUT_IPV6] if options.no_ipv6 else []
    red = 0
    with busy(options.load):
        for seed in range(options.seed, options.seed + options.times):
            words = [
                *alone,
                sys.executable,
                __file__,
                "--once",
                f"--seed={seed}",
                *tests,
            ]
            running = subprocess.Popen(
                words + ["--delays"] * options.delays,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                user=options.user,
                preexec_fn=prepare(options),
            )
            stops = stopping(running.pid, random.Random(seed))
            with stops if options.stops else contextlib.nullcontext():
                output, _ = running.communicate()
            lines = output.splitlines()
            print(f"seed {seed}: {lines[-1] if lines else output}", flush=True)
            if running.returncode:
                red += 1
                report = Path(tempfile.gettempdir()) / f"steady-{seed}.txt"
                report.write_text(output)
                failed = [
                    line for line in lines if line.startswith(("FAILED", "ERROR"))
                ]
                print("\n".join([*failed, f"all of it: {report}"]), flush=True)
    print(f"{red} of {options.times} runs were red")
    return bool(red)


if __name__ == "__main__":
    sys.exit(main())
