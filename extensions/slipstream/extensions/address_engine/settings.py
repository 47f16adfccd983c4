"""The settings that do not go with an engine at an address."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from slipstream.core.machine.address import is_loopback
from slipstream.core.settings.tables import Tables

# Settings that a rollout server reads whichever engine it has. All others are of an engine of its
# own, and would have no effect.
OF_ANY_ENGINE = frozenset(
    [
        "count",
        "max_episodes",
        "chat_template",
        "chat_template_kwargs",
        "engine_url",
        "engine_token_file",
        "drain_timeout_s",
        "start_timeout_s",
        "environment_memory_gib",
        "environment_processes",
    ]
)


def problems(config: Tables) -> Iterator[str]:
    """Yields a line for each setting that excludes the option, with the value and the rule."""
    server = config.rollout_server
    url = server.engine_url
    assert url is not None, "the option is on"
    parts = urlsplit(url)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        yield (
            f"rollout_server.engine_url must begin with https:// beyond loopback, got {url}: "
            "whoever reads or changes what travels there changes the training"
        )
    for name, field in type(server).model_fields.items():
        value = getattr(server, name)
        is_stated = name in server.model_fields_set
        if is_stated and name not in OF_ANY_ENGINE and value != field.default:
            yield (
                f"rollout_server.{name} must be left out with rollout_server.engine_url, got "
                f"{value!r}: the server at the address has its own settings"
            )
    if config.has_drafts:
        yield "rollout_server.engine_url excludes drafts: no layer that drafts is sent there"
    for name, (value, neutral) in config.sampling.cuts.items():
        yield (
            f"{name} must be {neutral!r} with rollout_server.engine_url, got {value!r}: an address "
            "does not record the tokens that a cut has left"
        )
