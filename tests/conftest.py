"""What holds for all tests: their process is as before afterwards; quick ones start no other."""

import functools
import gc
import importlib.util
import os
import random
import signal
import sys
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from support.rigs.not_run import not_run
from support.rigs.run_alone import alone

# The variable that pytest itself sets, and removes at the end of each phase.
OWN = "PYTEST_CURRENT_TEST"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Objects made and not freed between two looks of the collector; Python's own number is 700.
COLLECT_EVERY = 70_000
STARTS_A_PROCESS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
)
# The environment's variables when all tests have been collected.
_variables: dict[str, str] = {}
# Files with a test whose warnings are errors.
_strict: set[Path] = set()
# The test that runs now and may start no process; `make test-fast` runs only such tests.
_quick: list[str] = []


def refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook, which Python calls for whatever starts a process."""
    if event in STARTS_A_PROCESS and _quick:
        program = arguments[0] if arguments else event
        raise RuntimeError(
            f"{_quick[0]} starts {program!r}: give it the marker `process`"
        )


sys.addaudithook(refuse_processes)


def pytest_configure() -> None:
    """Refuses an editable install that has not read pyproject.toml's entry points."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())[
        "project"
    ]
    # Those of the package itself: a test may hide some from all that asks for those of a group.
    installed = distribution(project["name"]).entry_points
    for group, entries in project["entry-points"].items():
        missing = sorted(entries.keys() - installed.select(group=group).names)
        if missing:
            raise pytest.UsageError(
                f"the installed package lacks the entry points {', '.join(missing)} of {group}: "
                "run `make install`, which reads pyproject.toml again"
            )


# gRPC and torch say nothing of peers that go, which here are sent away.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# A thread that waits for others of its pool would take the core from them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if importlib.util.find_spec("hypothesis"):
    # Before any test takes the number of examples that is usual, and a deadline for each.
    importlib.import_module("support.rigs.fuzz_budget")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports make millions of objects that stay: the collector need not look at them again.

    What tests make is little of it garbage in circles: the collector looks a hundredth as often.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(COLLECT_EVERY)
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", default="1/1", help="2/5: every fifth file, from the second on"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Gives tests the marks that follow from their folder and from the marks of their file."""
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0]
        if folder in ("integration", "gpu"):
            item.add_marker("process")
        if folder == "gpu":
            item.add_marker("gpu")
        # A long file names the parameters of those of its tests that `make test` has.
        for mark in item.iter_markers("long_but"):
            if getattr(getattr(item, "callspec", None), "id", None) not in mark.args:
                item.add_marker("long")
    yield
    part, _, parts = config.getoption("--part").partition("/")
    files = list(dict.fromkeys(item.path for item in items))
    files_of_part = set(files[int(part) - 1 :: int(parts)])
    config.hook.pytest_deselected(
        items=[item for item in items if item.path not in files_of_part]
    )
    items[:] = [item for item in items if item.path in files_of_part]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of trainer ranks go to one worker: each would import Megatron for ranks of its own."""
    from xdist.scheduler import LoadFileScheduling

    class RanksTogether(LoadFileScheduling):
        @functools.cache  # noqa: B019 - it lives as long as the process
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return (
                "ranks" if "rank_pool" in (config.rootpath / file).read_text() else file
            )

    return (
        RanksTogether(config, log) if config.getoption("dist") == "loadfile" else None
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("process") is None:
        _quick[:] = [item.nodeid]
    seed_by(item.nodeid)
    try:
        return (yield)
    finally:
        _quick.clear()


def seed_by(name: str) -> None:
    """What a test draws depends on its name alone, not on the time or on what ran before it."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says why tests were skipped, by cause, and how to run one alone that failed."""
    stats = terminalreporter.stats
    say = terminalreporter.write_line
    causes = [
        report.longrepr[2].removeprefix("Skipped: ")
        for report in stats.get("skipped", ())
    ]
    for cause, number in Counter(causes).most_common():
        say(f"skipped {number}: {cause}")
    for name in dict.fromkeys(
        r.nodeid for key in ("failed", "error") for r in stats.get(key, ())
    ):
        say(f"run it alone: {alone(name)}")
    if text := not_run(str(terminalreporter.config.getoption("markexpr")), causes):
        say(text)


def warnings_are_errors(item: pytest.Item) -> bool:
    return any(mark.args == ("error",) for mark in item.iter_markers("filterwarnings"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a test leaves to the collector may warn; no later test shall fail for it.

    What lives on, such as imported modules, need not be looked at again: a second for vLLM's.
    """
    if (
        nextitem is not None
        and warnings_are_errors(nextitem)
        and not warnings_are_errors(item)
    ):
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def process_as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """vLLM leaves variables that torch reads in other tests; asyncio's loops take handlers away.

    A file whose warnings are errors and that leaves something open is red itself, and always.
    """
    restore_variables()
    folder = os.getcwd()
    handlers = [signal.getsignal(number) for number in SIGNALS]
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 0
    yield
    restore_variables()
    if torch is not None:
        torch.set_num_threads(threads)
    for number, handler in zip(SIGNALS, handlers, strict=True):
        signal.signal(number, handler)
    assert os.getcwd() == folder
    if request.path in _strict:
        gc.collect()
        gc.freeze()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What asyncio says of what an earlier test left to the collector, it says before this one."""
    gc.collect()
    return caplog


def pytest_collection_finish(session: pytest.Session) -> None:
    _strict.update(item.path for item in session.items if warnings_are_errors(item))
    _variables.update(variables_of_this_process())


def restore_variables() -> None:
    """Variables are those from before the first test, whenever and by whom one was set."""
    for name in variables_of_this_process().keys() - _variables.keys():
        del os.environ[name]
    os.environ.update(_variables)


def variables_of_this_process() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != OWN}
