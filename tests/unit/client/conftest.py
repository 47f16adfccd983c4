"""A warning in these tests is an error, and their clients of HTTP know no authority."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.environments.sandbox.sandbox import BACKENDS, why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error"))


@pytest.fixture(scope="module", autouse=True)
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every client reads all authorities of the machine for 50 ms, and none is asked here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("no-authorities")))
        yield


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox; one that cannot be here is skipped by name."""
    if reason := why_not(request.param):
        # Continuous integration has the package, and a kernel for it.
        assert request.param != "sandlock" or "this kernel has" in reason, reason
        pytest.skip(f"{request.param}: {reason}")
    return request.param
