"""Exports the run's status and its newest step as Prometheus metrics, read at each scrape.

Consumes: the status, the newest row, the totals of publishes. Produces: metrics, which other parts
have counted. docs/metrics.md says what the numbers mean.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from slipstream.core.run_folder import LEASE_WAITS
from slipstream.extensions.prometheus.endpoint import metrics_endpoint
from slipstream.learner.controller.kernel import Kernel
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.records.ledger import FATES
from slipstream.v1 import environment_pb2, fleet_pb2, status_pb2

# Values of the newest step's row: the metric's name after `slipstream_step_`, and its meaning.
STEP_METRICS: Mapping[str, tuple[str, str]] = {
    "reward_mean": ("reward_mean", "Mean reward of the batch."),
    "reward_std": ("reward_std", "Standard deviation of the batch's rewards."),
    "equal_rewards_fraction": ("equal_rewards_ratio", "Groups of equal rewards, of all groups."),
    "loss": ("loss", "Loss that the optimizer minimised."),
    "entropy": ("entropy_nats", "Mean entropy of the learner's distribution."),
    "kl": ("kl_nats", "Mean divergence of the learner from the sampling policy."),
    "clip_fraction": ("clip_ratio", "Trained tokens whose probability ratio was clipped."),
    "effective_sample_size": ("effective_sample_size_ratio", "Effective samples, of all tokens."),
    "grad_norm": ("gradient_norm", "Norm of the gradient before clipping."),
    "learning_rate": ("learning_rate", "Learning rate."),
    "lag_mean": ("lag_mean_versions", "Mean lag of the trained tokens."),
    "lag_max": ("lag_max_versions", "Largest lag of a trained token."),
    "logprob_gap_mean": ("logprob_gap_mean_nats", "Mean gap of learner and servers at lag 0."),
    "logprob_gap_max": ("logprob_gap_max_nats", "Largest gap of learner and servers at lag 0."),
    "reply_tokens_mean": ("reply_mean_tokens", "Mean length of a reply."),
    "episode_tokens_max": ("episode_max_tokens", "Length of the longest episode."),
    "truncated_fraction": ("truncated_ratio", "Episodes that a length limit ended."),
    "generation_s_mean": (
        "episode_generation_mean_seconds",
        "Mean time of an episode in the engine, waiting included.",
    ),
    "environment_s_mean": (
        "episode_environment_mean_seconds",
        "Mean time of an episode in its environment.",
    ),
    "step_s": ("duration_seconds", "Time since the step before."),
    "training_s": ("training_seconds", "Time from the batch to the new weights."),
    "waiting_s": ("waiting_seconds", "Time that the trainer waited for orders."),
    "groups_wait_s": ("groups_wait_seconds", "Time of it in which groups were missing."),
    "publish_s": ("publish_seconds", "Time in which the trainer sent weights."),
    "checkpoint_s": ("checkpoint_seconds", "Time in which a checkpoint stopped training."),
    "queue_s_mean": ("queue_mean_seconds", "Mean time from a group's completion to its step."),
    "episode_rest_s_mean": ("episode_rest_mean_seconds", "Mean time of an episode elsewhere."),
    "servers_sampling_share": ("servers_sampling_ratio", "Servers' time in which they sampled."),
    "servers_paused_share": ("servers_paused_ratio", "Servers' time of pauses for new weights."),
    "servers_idle_share": ("servers_idle_ratio", "Servers' time without requests."),
    "mfu": ("mfu_ratio", "Used share of the device's peak FLOP/s."),
    "trainer_rss_bytes": ("trainer_memory_bytes", "Main memory of the largest trainer rank."),
    "gpu_reserved_bytes": ("gpu_reserved_bytes", "Most memory that torch held on one rank."),
    "pause_s": ("publish_pause_seconds", "Newest pause of generation for new weights."),
    "weights_send_s": ("publish_send_seconds", "Time of the newest publish on the trainer."),
    "weights_bytes": ("publish_sent_bytes", "Bytes of the newest publish."),
}
# Values of a server's status, and of its newest report: the metric's name after
# `slipstream_server_`, and its meaning.
SERVER_STATES = {
    "silent_s": ("silent_seconds", "Time since the server's last message."),
    "leased_groups": ("leased_groups", "Groups leased to the server."),
}
SERVER_GAUGES = {
    "open_episodes": ("open_episodes", "Episodes that run."),
    "waiting_episodes": ("waiting_episodes", "Episodes that wait for a place."),
    "queued_bytes": ("queued_bytes", "Trajectories that wait for an acknowledgement."),
    "resident_bytes": ("resident_memory_bytes", "Main memory of server, engine and workers."),
    "uptime_s": ("uptime_seconds", "Time since the server joined last."),
}
SERVER_COUNTERS = {
    "generated_tokens": ("generated_tokens", "Tokens that the engine generated."),
    "drafted_tokens": ("drafted_tokens", "Tokens that were drafted before they were sampled."),
    "accepted_tokens": ("accepted_tokens", "Drafted tokens that were sampled."),
    "busy_s": ("busy_seconds", "Time with a request in the engine, without pauses."),
    "paused_s": ("paused_seconds", "Time of pauses for new weights."),
}
# Values of an environment's status: the metric's name after `slipstream_environment_`.
ENVIRONMENT_COUNTERS = {
    "groups_accepted": ("accepted_groups", "Groups that can be trained."),
    "groups_failed": ("failed_groups", "Groups that were set aside."),
    "episodes_failed": ("failed_episodes", "Episodes without a reward."),
}
# Values of an environment's newest evaluation: the metric's name after `slipstream_evaluation_`.
EVALUATION_GAUGES = {
    "reward_mean": ("reward_mean", "Mean reward of the newest evaluation."),
    "reward_std": ("reward_std", "Standard deviation of its rewards."),
    "num_episodes": ("episodes", "Its episodes that have a reward."),
}
_GONE = {fleet_pb2.SERVER_STATE_DEAD, fleet_pb2.SERVER_STATE_LEFT}


class RunCollector:
    """A Prometheus collector of the run's metrics, used in the controller's event loop."""

    def __init__(self, kernel: Kernel) -> None:
        self._config = kernel.run.config
        self._service = kernel.status
        self._publisher = kernel.publisher
        self._feed = kernel.intake.feed
        self._refusals = kernel.refusals
        self._state = kernel.books.state
        self._disk = DiskSpace(self._config.run_dir)

    def collect(self) -> Iterator[Metric]:
        status = self._service.status()
        row = self._service.recorder.newest
        yield from self._run(status, row)
        yield from self._servers(status)
        yield from self._environments(status, row)
        yield from self._disk.collect()

    def _run(self, status: status_pb2.RunStatus, row: Mapping[str, float]) -> Iterator[Metric]:
        totals = self._publisher.totals
        ledger = status.ledger
        servers_lost = "Times that a rollout server was lost before it had drained."
        paused = "Pauses of generation for new weights, of all servers."
        set_aside = "Batches that could not be trained, as with a loss that is not finite."
        refused = "Calls to the controller that were refused, as with a wrong token."
        for name, meaning, value in (
            ("steps", "Trained steps of the run.", status.step),
            ("generated_tokens", "Tokens that all engines generated.", ledger.generated),
            ("trained_tokens", "Tokens of batches that were trained.", ledger.trained),
            ("servers_lost", servers_lost, self._service.fleet.num_lost),
            ("set_aside_batches", set_aside, len(self._state.set_aside)),
            ("refused_calls", refused, self._refusals.num_refused),
            ("publishes", "Versions that were sent to servers.", totals.publishes),
            ("published_bytes", "Bytes of sent weights.", totals.published_bytes),
            ("publish_pause_seconds", paused, totals.pause_s),
        ):
            yield CounterMetricFamily(f"slipstream_{name}", meaning, value)
        # The controller's own clock does not jump with the time of day.
        newest_s = time.time() - self._service.recorder.since_step_s
        newest = "When the newest step was done, or the controller began."
        every = "Steps between two checkpoints; 0: none is written."
        reserved = "Queue that is used or reserved for leased episodes."
        difference = "Tokens that are lost at a hand-over, less those that are there twice."
        gaps = "Hand-overs of trajectories whose two sides count differently."
        for name, meaning, value in (
            ("planned_steps", "Steps that the run will train.", status.num_steps),
            ("checkpointed_steps", "Steps of the newest checkpoint.", status.checkpoint_step),
            ("checkpoint_every_steps", every, self._config.checkpoint.every_steps),
            ("last_step_timestamp_seconds", newest, newest_s),
            ("max_staleness_versions", "Bound of the lag of trained tokens.", status.max_staleness),
            ("probe_tolerance_nats", "Largest allowed gap.", self._config.probe_tolerance),
            ("probe_gap_max_nats", "Largest gap of a probe.", totals.probe_gap_max),
            ("leased_groups", "Groups leased and not trained.", status.leased_groups),
            ("complete_groups", "Those of them that are complete.", status.complete_groups),
            ("queue_bytes", "Trajectories in the queue.", status.queued_bytes),
            ("queue_reserved_bytes", reserved, status.reserved_bytes),
            ("queue_limit_bytes", "Size of the queue.", self._config.queue.max_bytes),
            ("ledger_difference_tokens", difference, ledger.difference),
            ("ledger_gaps", gaps, len(ledger.gaps)),
            *(
                (f"step_{short_name}", meaning, row[name])
                for name, (short_name, meaning) in STEP_METRICS.items()
                if name in row
            ),
        ):
            yield GaugeMetricFamily(f"slipstream_{name}", meaning, value)
        states = {
            name.removeprefix("RUN_STATE_").lower(): status.state == state
            for name, state in status_pb2.RunState.items()[1:]
        }
        yield _gauges("run_state", "Whether the run is in a state.", "state", states)
        fates = {fate: getattr(ledger, fate) for fate in FATES}
        yield _gauges("ledger_tokens", "Where the generated tokens are now.", "fate", fates)
        waited = {cause: self._service.scheduler.waited_s()[cause] for cause in LEASE_WAITS}
        meaning = "Time in which the next lease lacked something."
        yield _counters("lease_wait_seconds", meaning, "cause", waited)

    def _servers(self, status: status_pb2.RunStatus) -> Iterator[Metric]:
        connected = {s.server_id: s for s in status.servers if s.state not in _GONE}
        states = {
            fleet_pb2.ServerState.Name(state).removeprefix("SERVER_STATE_").lower(): sum(
                server.state == state for server in connected.values()
            )
            for state in fleet_pb2.ServerState.values()[1:]
            if state not in _GONE
        }
        yield _gauges("servers", "Connected rollout servers.", "state", states)
        versions = {name: server.version.step for name, server in connected.items()}
        yield _gauges("server_version", "Step of the version it serves.", "server", versions)
        reports = {name: server.report for name, server in connected.items()}
        for table, make, messages in (
            (SERVER_STATES, _gauges, connected),
            (SERVER_GAUGES, _gauges, reports),
            (SERVER_COUNTERS, _counters, reports),
        ):
            for field, (name, meaning) in table.items():
                values = {key: getattr(message, field) for key, message in messages.items()}
                yield make(f"server_{name}", meaning, "server", values)
        yield _disabled_features(connected)

    def _environments(
        self, status: status_pb2.RunStatus, row: Mapping[str, float]
    ) -> Iterator[Metric]:
        entries = {entry.spec.name: entry for entry in status.environments}
        state = environment_pb2.ENVIRONMENT_STATE_SUSPENDED
        meaning = "Whether no group is leased for it any more."
        suspended = {name: entry.state == state for name, entry in entries.items()}
        yield _gauges("environment_suspended", meaning, "environment", suspended)
        rewards = {name: row[f"{name}/reward"] for name in entries if f"{name}/reward" in row}
        meaning = "Mean reward of its episodes in the step."
        yield _gauges("environment_reward_mean", meaning, "environment", rewards)
        rounds = {name: entry.newest_round.numbers for name, entry in entries.items()}
        for field, (name, meaning) in EVALUATION_GAUGES.items():
            values = {
                environment: numbers[field]
                for environment, numbers in rounds.items()
                if field in numbers
            }
            yield _gauges(f"evaluation_{name}", meaning, "environment", values)
        ended = {name: self._feed.count(name, "episodes") for name in entries}
        meaning = "Episodes that have arrived, with a reward or without."
        yield _counters("environment_episodes", meaning, "environment", ended)
        for field, (short_name, meaning) in ENVIRONMENT_COUNTERS.items():
            values = {name: getattr(entry, field) for name, entry in entries.items()}
            yield _counters(f"environment_{short_name}", meaning, "environment", values)


def _disabled_features(servers: Mapping[str, status_pb2.ServerStatus]) -> Metric:
    """Returns a gauge of 1 for each feature that a server's engine does without."""
    family = GaugeMetricFamily(
        "slipstream_server_disabled_feature",
        "Feature that the server's engine does without, and why.",
        labels=["server", "feature", "cause"],
    )
    for name, server in servers.items():
        for feature, cause in server.disabled_features.items():
            family.add_metric([name, feature, cause], 1.0)
    return family


class DiskSpace:
    """Size and free space of the disk of the run's folder, as measured at the previous scrape.

    A thread measures them, since a disk that hangs would block the event loop; at most one thread
    runs.
    """

    def __init__(self, folder: Path) -> None:
        """Starts the first measurement; needs a running event loop."""
        self._folder = folder
        self._newest: tuple[int, int] | None = None
        self._asking = self._ask()

    def collect(self) -> Iterator[Metric]:
        """Yields size and free space of the disk in bytes, or nothing before both are known."""
        if self._asking.done():
            self._newest = self._asking.result()
            self._asking = self._ask()
        if self._newest is not None:
            total, free = self._newest
            yield GaugeMetricFamily("slipstream_disk_size_bytes", "Size of the run's disk.", total)
            yield GaugeMetricFamily("slipstream_disk_free_bytes", "Room on the run's disk.", free)

    def _ask(self) -> asyncio.Future[tuple[int, int] | None]:
        def room() -> tuple[int, int] | None:
            try:
                usage = shutil.disk_usage(self._folder)
            except OSError:
                return None
            return usage.total, usage.free

        return asyncio.get_running_loop().run_in_executor(None, room)


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    meaning: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(f"slipstream_{name}", meaning, labels=[label])
    for text, value in values.items():
        family.add_metric([text], float(value))
    return family


_gauges = partial(_labelled, GaugeMetricFamily)
_counters = partial(_labelled, CounterMetricFamily)


class MetricsPart(Part):
    """Serves the controller's /metrics."""

    def __init__(self, kernel: Kernel) -> None:
        self._config = kernel.run.config
        self._progress = kernel.run.progress
        self._collector = RunCollector(kernel)

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        async with metrics_endpoint(self._config, "controller", [self._collector]) as endpoint:
            try:
                yield
            finally:
                # Prometheus would otherwise see the run disappear, as after an end in order.
                if self._progress.has_failed:
                    await endpoint.next_scrape()
