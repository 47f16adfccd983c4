"""The settings that do not go with the engine's bits."""

from collections.abc import Iterator
from operator import attrgetter

from slipstream.core.settings.tables import Tables


def problems(config: Tables) -> Iterator[str]:
    """Yields a line for each setting that excludes the option, with the value and the rule."""
    for name, (_, neutral) in config.sampling.cuts.items():
        value = attrgetter(name)(config)
        if value != neutral:
            yield (
                f"algorithm.agreement = 'bits' needs {name} = {neutral!r}: the learner leaves out "
                f"no token, got {value!r}"
            )
    if config.has_drafts and not config.rollout_server.drafts:
        yield (
            "algorithm.agreement = 'bits' excludes drafts: several tokens are computed by other "
            "kernels than one"
        )
    allowed_for_engine = (
        "max_num_",
        "kv_cache_memory_bytes",
        "load_format",
        "enable_prefix_caching",
    )
    for section, table, allowed in (
        ("rollout_server.engine", config.rollout_server.engine, allowed_for_engine),
        ("learner.transformer", config.learner.transformer, ("recompute_", "num_layers_in_")),
    ):
        for key in table:
            if not key.startswith(allowed):
                yield (
                    f"algorithm.agreement = 'bits' excludes {section}.{key}: it may change kernels"
                )
