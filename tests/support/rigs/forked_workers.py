"""Tests side by side: `--workers 3` forks the process that has collected them, imports included.

Consumes: the collected tests. Produces: their reports, as if this process had run them. Waits for:
the workers. Unblocked by: a worker's message or its end. The tests of one file stay together and
share their fixtures; a worker takes its next file when it begins the last test that it has.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest
from slipstream.core.machine.process import die_with_parent

NUMBER_BYTES = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="processes that run the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests in workers when several are asked for; otherwise pytest runs them."""
    options = session.config.option
    if options.workers < 2 or options.collectonly or session.testsfailed:
        return None
    Workers(session).run(options.workers)
    return True


class Workers:
    """The side of the process that has collected the tests."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._files = [[*items] for _, items in groupby(session.items, lambda item: item.path)]
        self._turns, turns = os.pipe()
        # A pipe holds as much without a reader.
        os.write(turns, b"".join(n.to_bytes(NUMBER_BYTES) for n in range(len(self._files))))
        os.close(turns)
        self._workers: list[Worker] = []
        self._started = 0

    def run(self, number: int) -> None:
        """Returns when all tests have run; raises Failed or Interrupted as pytest itself does."""
        terminal = self._session.config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            # Files take turns on the line.
            terminal.showfspath = False
        try:
            for _ in range(min(number, len(self._files))):
                self._start([])
            while self._workers:
                self._hear_all()
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGINT)
            for worker in self._workers:
                os.waitpid(worker.pid, 0)

    def _start(self, first: list[pytest.Item]) -> None:
        """Forks a worker that runs the tests of `first` before it takes a file."""
        self._started += 1
        ours, theirs = Pipe(duplex=False)
        pid = os.fork()
        if not pid:
            _Work(self._session, theirs).run(self._started, self._items(theirs, first))
        theirs.close()
        self._workers.append(Worker(pid, ours, first))

    def _items(self, out: Connection, first: list[pytest.Item]) -> Iterator[pytest.Item]:
        yield from first
        while taken := os.read(self._turns, NUMBER_BYTES):
            number = int.from_bytes(taken)
            _send(out, takes=number)
            yield from self._files[number]

    def _hear_all(self) -> None:
        ready = wait([each for worker in self._workers for each in (worker.out, worker.end)])
        for worker in [*self._workers]:
            with contextlib.suppress(EOFError):
                while worker.out.poll():
                    self._hear(worker, json.loads(worker.out.recv_bytes()))
            if worker.end in ready:
                self._ended(worker)

    def _hear(self, worker: Worker, message: dict[str, Any]) -> None:
        hook = self._session.config.hook
        if "takes" in message:
            worker.items.extend(self._files[message["takes"]])
        elif "ends" in message:
            worker.items.popleft()
        elif "warning" in message:
            name, text, *place = message.pop("warning")
            said = warnings.WarningMessage(text, type(name, (Warning,), {}), *place)
            hook.pytest_warning_recorded.call_historic(kwargs=message | {"warning_message": said})
        else:
            config = self._session.config
            report = hook.pytest_report_from_serializable(config=config, data=message)
            hook.pytest_runtest_logreport(report=report)

    def _ended(self, worker: Worker) -> None:
        """Fails the test in which a worker ended too early; another goes on behind that test."""
        self._workers.remove(worker)
        worker.out.close()
        os.close(worker.end)
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if not worker.items:
            assert not code, f"a worker ended with code {code} between two files"
            return
        item = worker.items.popleft()
        cause = f"the process that ran it ended with code {code}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", cause, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        self._start([*worker.items])


class Worker:
    """A process, its messages, and the tests that it has taken and not ended."""

    def __init__(self, pid: int, out: Connection, items: Sequence[pytest.Item]) -> None:
        self.pid, self.out, self.items = pid, out, deque(items)
        # Readable when the process has ended, whoever has its ends of pipes by then.
        self.end = os.pidfd_open(pid)


class _Work:
    """The side of a worker, as a plugin of its pytest."""

    def __init__(self, session: pytest.Session, out: Connection) -> None:
        self._session, self._out = session, out
        # Before that, a new plugin is told all earlier warnings, which the other process has.
        self._is_begun = False

    def run(self, number: int, items: Iterator[pytest.Item]) -> NoReturn:
        die_with_parent()
        config = self._session.config
        plugins = config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(self)
        self._is_begun = True
        if (capture := plugins.getplugin("capturemanager")) is not None:
            # The files that hold what a test prints have one position for all who share them.
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()
        folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
        folders._basetemp = folders.getbasetemp() / f"w{number}"
        folders._basetemp.mkdir()
        code = 1
        try:
            self._run(items)
            code = 0
        except KeyboardInterrupt:
            self._session._setupstate.teardown_exact(None)
        finally:
            # Whatever went wrong: nothing else of the other process's goes on here.
            if (error := sys.exception()) is not None:
                traceback.print_exception(error)
            os._exit(code)

    def _run(self, items: Iterator[pytest.Item]) -> None:
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            _send(self._out, ends=item.nodeid)
            item = following

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        _send(self._out, **data)

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        said = warning_message
        what = (said.category.__name__, str(said.message), said.filename, said.lineno)
        if self._is_begun:
            _send(self._out, warning=what, when=when, nodeid=nodeid, location=location)


def _send(out: Connection, **message: object) -> None:
    out.send_bytes(json.dumps(message).encode())
