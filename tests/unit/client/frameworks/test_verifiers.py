from __future__ import annotations

import importlib.util

import pytest
from slipstream.client.frameworks.packages import needs
from slipstream.client.frameworks.verifiers import Verifiers
from slipstream.protocol.errors import ConfigError


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is here")
def test_without_verifiers_one_line_says_where_to_install_it() -> None:
    with pytest.raises(ConfigError) as caught:
        Verifiers("gsm8k-v1")
    assert str(caught.value) == (
        "verifiers is not installed: pip install 'verifiers>=0.4,<0.5' in a virtual environment "
        "of its own, and give its interpreter as `python` of the environment"
    )


def test_a_package_of_the_package_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="^No module named 'json.no_such': install it$"):
        needs("json.no_such", "json", "install it")
