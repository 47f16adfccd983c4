"""A warning in these tests is an error."""

from pathlib import Path

import pytest
from slipstream.client.sandbox.sandbox import BACKENDS, why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error"))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox; one that cannot be here is skipped by name."""
    if reason := why_not(request.param):
        # Continuous integration has the package, and a kernel for it.
        assert request.param != "sandlock" or "this kernel has" in reason, reason
        pytest.skip(f"{request.param}: {reason}")
    return request.param
