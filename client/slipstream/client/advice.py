"""Describes where a run's newest step spent its time, and what other settings would gain.

`profile_lines` predicts the speed of a run before its start, from the profile of an earlier run.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from slipstream.core.advice import (
    CHANGES,
    LEASE_WAITS,
    SERVER_SHARES,
    TRAINER_PARTS,
    advise,
    profile_from_json,
    waits_for,
)
from slipstream.core.errors import ConfigError
from slipstream.core.regular_files import read_regular
from slipstream.core.run_folder import ADVICE
from slipstream.core.settings.config import Config
from slipstream.core.settings.rank_layout import RankLayout
from slipstream.core.step_simulation import Setting


def time_lines(metrics: Mapping[str, float]) -> list[str]:
    """Returns lines on how the newest step spent its time, or [] before the first step."""
    step_s = metrics.get("step_s", 0.0)
    if not step_s or "groups_wait_s" not in metrics:
        return []
    parts = {words: metrics.get(name, 0.0) for name, words in TRAINER_PARTS.items()}
    parts["other"] = max(0.0, step_s - sum(parts.values()))
    lines = [
        f"a step takes {step_s:.2f} s: {waits_for(metrics)}",
        f"  trainer: {_shares(parts, step_s)}",
    ]
    if SERVER_SHARES[0] in metrics:
        servers = {name.split("_")[1]: metrics[name] for name in SERVER_SHARES}
        lines.append(f"  servers: {_shares(servers, 1.0)}")
    causes = {
        words: metrics.get(f"lease_wait_{name}_s", 0.0) for name, words in LEASE_WAITS.items()
    }
    if any(causes.values()):
        lines.append(f"  the next lease waits for {_shares(causes, step_s)}")
    waited = metrics.get("queue_s_mean")
    if waited is not None:
        lines.append(f"  queue: a complete group waits {waited:.2f} s for its step")
    episode = {
        "engine": metrics.get("generation_s_mean", 0.0),
        "environment": metrics.get("environment_s_mean", 0.0),
        "rest": metrics.get("episode_rest_s_mean", 0.0),
    }
    told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in episode.items())
    return [*lines, f"  episode: {told}"]


def advice_lines(metrics: Mapping[str, float]) -> list[str]:
    """Returns lines on the gain from other settings, or [] before the first prediction."""
    gains = {name: metrics[f"gain/{name}"] for name in CHANGES if f"gain/{name}" in metrics}
    if not gains:
        return []
    error = metrics.get("prediction_error")
    told = "not checked yet" if error is None else f"the last one was off by {error:+.0%}"
    return [
        f"predicted: {metrics['predicted_steps_per_s']:.3g} steps/s ({told}); rollout servers "
        f"wanted: {metrics['wanted_servers']:.0f}",
        *_gain_lines(gains),
    ]


def profile_lines(config: Config, run: Path) -> list[str]:
    """Returns lines that predict how fast `config` would run on the machines of an earlier run.

    `run` is that run's folder. Raises ConfigError if it has no profile.
    """
    path = run / ADVICE
    try:
        profile = profile_from_json(json.loads(read_regular(path))["profile"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(
            f"--profile needs the folder of a run of some 20 steps or more, "
            f"{path} is missing or damaged"
        ) from None
    layout = RankLayout.of(config.learner.parallel, config.learner.world_size)
    setting = Setting(
        servers=config.rollout_server.count,
        replicas=layout.dp,
        max_staleness=config.algorithm.max_staleness,
        group_size=config.algorithm.group_size,
    )
    share = profile.setting.replicas / setting.replicas
    planned = replace(
        profile,
        setting=setting,
        groups_per_step=config.algorithm.groups_per_step,
        places=config.rollout_server.max_episodes,
        training_token_s=profile.training_token_s * share,
    )
    advice = advise(planned)
    gains = {each.name: each.gain for each in advice.alternatives}
    return [
        f"By the profile of {run}: {advice.now.steps_per_s:.3g} steps/s, the trainer waits for "
        f"groups for {advice.now.waiting_share:.0%} of the time, {advice.now.places_share:.0%} of "
        f"the servers' places are taken; rollout servers wanted: {advice.wanted_servers}",
        *_gain_lines(gains),
    ]


def _gain_lines(gains: Mapping[str, float]) -> list[str]:
    ordered = sorted(gains, key=lambda name: -gains[name])
    width = max(len(CHANGES[name]) for name in ordered)
    return [f"  {CHANGES[name]:<{width}}  {gains[name]:+.0%} steps/s" for name in ordered]


def _shares(parts: Mapping[str, float], whole: float) -> str:
    return ", ".join(f"{name} {value / whole:.0%}" for name, value in parts.items() if value)
