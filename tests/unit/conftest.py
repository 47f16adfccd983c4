"""A warning in the tests of these packages is an error."""

from collections.abc import Iterator
from pathlib import Path

import pytest

STRICT = {
    Path(__file__).parent / name
    for name in ("client", "core", "environments", "protocol")
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if STRICT & set(item.path.parents):
            item.add_marker(pytest.mark.filterwarnings("error"))


@pytest.fixture(scope="module")
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every client of HTTP reads all authorities of the machine for 50 ms; here it finds none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("no-authorities")))
        yield
