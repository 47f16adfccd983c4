import pytest


@pytest.fixture(scope="module", autouse=True)
def authorities(no_authorities: None) -> None:
    """No test of these asks an authority."""
