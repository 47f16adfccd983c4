"""What a module of tests changes in this process is as before for the next one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

# The variable that pytest itself sets, and removes at the end of each phase.
OWN = "PYTEST_CURRENT_TEST"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module", autouse=True)
def process_as_before() -> Iterator[None]:
    """vLLM leaves variables that torch reads in other tests; asyncio's loops take handlers away."""
    variables, folder = variables_of_this_process(), os.getcwd()
    handlers = [signal.getsignal(number) for number in SIGNALS]
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 0
    yield
    for name in variables_of_this_process().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    if torch is not None:
        torch.set_num_threads(threads)
    for number, handler in zip(SIGNALS, handlers, strict=True):
        signal.signal(number, handler)
    assert os.getcwd() == folder


def variables_of_this_process() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != OWN}
