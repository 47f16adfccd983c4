import pytest
from slipstream.environments.sandbox.sandbox import BACKENDS, why_not


@pytest.fixture(scope="module", autouse=True)
def authorities(no_authorities: None) -> None:
    """No test of these asks an authority."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox; one that cannot be here is skipped by name."""
    if reason := why_not(request.param):
        # Continuous integration has the package, and a kernel for it.
        assert request.param != "sandlock" or "this kernel has" in reason, reason
        pytest.skip(f"{request.param}: {reason}")
    return request.param
