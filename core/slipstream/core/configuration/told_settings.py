"""The settings of a run as others may see them."""

from pydantic import JsonValue
from slipstream.core.settings.config import Config

# Settings that hold or locate secrets, which no tracking service should get.
_UNTOLD = (
    "queue.redis_url",
    "queue.redis_password_file",
    "queue.controller",
    "queue.rollout_server",
    "security",
)


def told_settings(config: Config) -> dict[str, JsonValue]:
    """All settings but secrets, by flat names like `algorithm.max_staleness`."""
    flat: dict[str, JsonValue] = {}

    def flatten(prefix: str, value: JsonValue) -> None:
        if prefix in _UNTOLD:
            return
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                flatten(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    flatten("", config.model_dump(mode="json"))
    return flat
