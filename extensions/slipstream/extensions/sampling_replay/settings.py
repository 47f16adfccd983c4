"""What a run needs so that the tokens that each token was drawn from can be recorded."""

from collections.abc import Iterator
from pathlib import Path

from slipstream.core.configuration.config_file import vocabulary_size
from slipstream.core.errors import ConfigError
from slipstream.core.kept_tokens import MAX_KEPT_TOKENS, fit_a_record
from slipstream.core.settings.config import Config
from slipstream.core.settings.tables import Tables


def problems(config: Tables) -> Iterator[str]:
    """Yields a line for each setting with which the learner would use other tokens."""
    cuts = " and ".join(f"{name} = {value!r}" for name, (value, _) in config.sampling.cuts.items())
    if config.sampling.top_k > MAX_KEPT_TOKENS:
        yield (
            f"sampling.top_k must be at most {MAX_KEPT_TOKENS}, as records have no room for more, "
            f"got {config.sampling.top_k}"
        )
    kl = config.algorithm.kl
    if kl.uses_top_k:
        yield (
            f"algorithm.kl.estimator = {kl.estimator!r} excludes {cuts}: the reference's likely "
            "tokens may be among those that are left out"
        )
    for setting in config.reference.servers if config.reference is not None else ():
        yield (
            f"{setting} excludes {cuts}: it gives log-probabilities over all tokens, and "
            "the policy's are over those that are kept"
        )


def check_vocabulary(config: Config) -> None:
    """Raises ConfigError if sets of kept tokens may be larger than a record has room for."""
    sampling = config.sampling
    num_tokens = vocabulary_size(config.model.path)
    if not fit_a_record(sampling.top_k, num_tokens):
        cuts = " and ".join(f"{name} = {value!r}" for name, (value, _) in sampling.cuts.items())
        raise ConfigError(
            f"{cuts} may keep any number of the model's {num_tokens} tokens, and records have room "
            f"for {MAX_KEPT_TOKENS}: set sampling.top_k to at most {MAX_KEPT_TOKENS}, got 0"
        )


def engine_arguments(config: Config, folder: Path | None, *, on_cpu: bool) -> dict[str, object]:
    """Returns the argument by which vLLM returns what each token was drawn from."""
    return {"return_sampling_mask": True}
