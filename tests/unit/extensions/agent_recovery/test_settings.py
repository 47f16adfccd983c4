"""Settings with which no call of an agent would be kept."""

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.extension import active
from support.fakes.small_configs import small_config


def options(**tables: object) -> set[str]:
    """The names of the options that settings ask for."""
    return {option.name for option in active(small_config(**tables))}


def test_the_setting_alone_switches_it_on() -> None:
    assert "agent_recovery" in options(agents={"recover": True})
    assert "agent_recovery" not in options()


def test_a_clients_own_loop_has_no_episodes_to_recover() -> None:
    with pytest.raises(
        ConfigError, match="agents.recover has no effect with controller"
    ):
        small_config(
            controller={"client_loop": True},
            agents={"recover": True},
        )
