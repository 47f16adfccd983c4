"""The settings with which the learner could not score tokens by the version that sampled them."""

from collections.abc import Iterator

from slipstream.core.settings.tables import Tables


def problems(config: Tables) -> Iterator[str]:
    """Yields a line for each setting that excludes the option, with the value and the rule."""
    algorithm = config.algorithm
    start = f"algorithm.weight = {algorithm.weight!r}"
    if algorithm.max_staleness == 0:
        yield (
            f"{start} needs algorithm.max_staleness >= 1, got 0: no token is of an older version, "
            "and algorithm.weight = 'token' gives the same"
        )
    transformer = config.learner.transformer
    recipe = transformer.get("fp8_recipe", "delayed")
    if transformer.get("fp8") and recipe == "delayed":
        yield (
            f"{start} excludes learner.transformer.fp8 with fp8_recipe = 'delayed': its scales are "
            "of the batches before, so that no earlier version can be computed again"
        )
    if transformer.get("fp8_param"):
        yield f"{start} excludes learner.transformer.fp8_param: 8-bit parameters are not copied"
