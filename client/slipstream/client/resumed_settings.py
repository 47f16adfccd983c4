"""Which settings a run may change when it goes on.

A step that is trained again must reproduce the recorded step, whose digest is compared. Leased
groups keep their tasks, seeds and deadlines. So a resumed run must keep some settings as they are
(marked as `Fixed`), and may only increase others (`Growing`).
"""

from collections.abc import Iterator
from operator import attrgetter

from slipstream.core.environment_rules import objectives_of, temperatures_of
from slipstream.core.errors import ConfigError
from slipstream.core.extension import installed
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.settings.config import Config
from slipstream.core.settings.section import Fixed, Growing


def check_resumable(before: Config, now: Config) -> None:
    """Raises ConfigError for the first setting with a change that is not allowed."""
    for problem in _changes(before, now):
        raise ConfigError(f"{problem}; choose another run.name for a new run")
    for name, digest in now.sources.items():
        changed = before.sources.get(name, digest) != digest
        if changed and now.run.resume != "changed":
            raise ConfigError(
                f"{name}: changed since the run was started; to go on with it set "
                'run.resume = "changed", or choose another run.name for a new run'
            )
    for key, mark in Config.marked(Growing).items():
        old, new = map(attrgetter(key), (before, now))
        if new < old:
            raise ConfigError(
                f"{key} must be at least {old} when a run goes on, got {new}: {mark.reason}"
            )


def _changes(before: Config, now: Config) -> Iterator[str]:
    """Yields one line for each change for which a new run is needed."""
    on = "when a run goes on"
    for key, mark in Config.marked(Fixed).items():
        old, new = map(attrgetter(key), (before, now))
        if old != new:
            yield f"{key} must stay {old} {on}, got {new}: {mark.reason}"
    stored_now = _stored_models(now)
    for key, was_stored in _stored_models(before).items():
        if was_stored != stored_now[key]:
            change, noun = ("left out", "that") if was_stored else ("added", "no such")
            yield f"{key} cannot be {change} {on}: its checkpoints hold {noun} model"
    yield from _likely_token_changes(before, now)
    yield from _temperature_changes(before, now)
    yield from _cut_changes(before, now)
    yield from _group_size_changes(before, now)
    names = [section.name for section in now.environments]
    for section in before.environments:
        if section.name not in names:
            message = (
                f"environments must keep {section.name} {on}, got {', '.join(names) or 'none'}"
            )
            yield f"{message}: its groups are leased, and a smaller weight gives it fewer"
    adapters = {section.name: section.adapter for section in now.played}
    for name, adapter in ((section.name, section.adapter) for section in before.played):
        if (new_one := adapters.get(name, adapter)) != adapter:
            reason = "its leased groups are sampled with it"
            yield f"adapter of {name} must stay {adapter!r} {on}, got {new_one!r}: {reason}"


def _likely_token_changes(before: Config, now: Config) -> Iterator[str]:
    """Yields a line for each environment whose recorded replies would lack what a server says."""
    environments = {""}
    for config in (before, now):
        for teacher in config.reference.teachers.values() if config.reference is not None else ():
            environments |= {*teacher.environments}
    for name in sorted(environments):
        was_asked = _top_k(before, name)
        is_asked = _top_k(now, name)
        if was_asked != is_asked:
            yield (
                f"reference.top_k{f' of {name}' if name else ''} must stay {was_asked} when a run "
                f"goes on, got {is_asked}: recorded replies carry this number of likely tokens of "
                "a server"
            )


def _temperature_changes(before: Config, now: Config) -> Iterator[str]:
    old_ones = temperatures_of(before)
    new_ones = temperatures_of(now)
    for name in sorted(old_ones.keys() | new_ones.keys()):
        old = old_ones.get(name, before.sampling.temperature)
        new = new_ones.get(name, now.sampling.temperature)
        if old != new:
            yield (
                f"temperature of {name} must stay {old:g} when a run goes on, got {new:g}: "
                "recorded replies were sampled with it"
            )


def _cut_changes(before: Config, now: Config) -> Iterator[str]:
    """Yields what cannot train recorded replies that engines sampled from a part of the tokens."""
    cuts = " and ".join(f"{name} = {value!r}" for name, (value, _) in before.sampling.cuts.items())
    if not cuts:
        return
    if before.replays_sampling:
        # The learner computes over the recorded tokens, whatever is sampled now.
        unlike: list[str] = []
        if now.algorithm.kl.uses_top_k:
            unlike.append(f"algorithm.kl.estimator = {now.algorithm.kl.estimator!r}")
        if now.reference is not None and now.reference.server is not None:
            unlike.append("reference.server")
        if now.algorithm.agreement == "bits":
            unlike.append("algorithm.agreement = 'bits'")
        for setting in unlike:
            yield (
                f"{setting} must wait for a new run: recorded replies were sampled with {cuts}, "
                "and it knows no part of the vocabulary"
            )
        return
    readers: set[str] = set()
    for objective in objectives_of(now).values():
        readers |= objective.behavior_ratios.keys()
    own_before = before.algorithm.own_functions
    for kind, function in now.algorithm.own_functions.items():
        # A function that the run began with was tried with these settings.
        if kind in ("loss", "weight") and own_before.get(kind) != function:
            readers.add(f"algorithm.{kind} = {function!r}")
    for reader in sorted(readers):
        yield (
            f"{reader} must wait for a new run: recorded replies were sampled with {cuts}, without "
            "a record of the tokens that were left out, and it would compare unlike probabilities"
        )


def _group_size_changes(before: Config, now: Config) -> Iterator[str]:
    old_sizes = group_sizes_of(before)
    new_sizes = group_sizes_of(now)
    for name in sorted(old_sizes.of_environments.keys() | new_sizes.of_environments.keys()):
        old = old_sizes.of(name)
        new = new_sizes.of(name)
        if old != new:
            yield (
                f"group_size of {name} must stay {old} when a run goes on, got {new}: groups of "
                "this size are leased"
            )


def _stored_models(config: Config) -> dict[str, bool]:
    reference = config.reference
    is_refreshed = reference is not None and reference.refresh_every_steps > 0
    return {
        "critic": config.critic is not None,
        **{
            name: getattr(config, name) is not None
            for manifest in installed()
            if manifest.stores_model
            for name in manifest.tables
        },
        "reference.refresh_every_steps": is_refreshed,
    }


def _top_k(config: Config, environment: str) -> int | None:
    """Returns how many likely tokens a server gives for an environment; None without a server."""
    reference = config.reference
    if reference is None or reference.server_of(environment) is None:
        return None
    return reference.top_k
