"""What a run writes down: metrics of each step, sampled trajectories, summary and curves."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from pydantic import JsonValue
from slipstream.learner.controller.evaluations.evaluation import EvaluationResult
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.leasing.generation_rate import GenerationRate
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.reporting.busy import BusyMeter, Interval
from slipstream.learner.controller.reporting.readable import (
    TokenTexts,
    open_token_texts,
    readable,
)
from slipstream.learner.controller.reporting.resources import run_resources
from slipstream.learner.controller.reporting.trackers.opening import open_trackers
from slipstream.learner.controller.reporting.trackers.writers import Trackers
from slipstream.learner.controller.trajectories.batch_statistics import (
    batch_statistics,
    environment_means,
)
from slipstream.learner.controller.trajectories.batches import (
    Batch,
    token_lags,
    with_several_versions,
)
from slipstream.protocol.settings.config import Config
from slipstream.v1 import fleet_pb2, status_pb2

EDGE_STEPS = 5
SAMPLED_GROUPS = 2
SAMPLED_MEMBERS = 4


@dataclass
class RunFacts:
    """What adds up over a run."""

    reward_by_step: list[float] = field(default_factory=list)
    lag_counts: Counter[int] = field(default_factory=Counter)
    with_several_versions: int = 0
    gap_sum: float = 0.0
    gap_tokens: float = 0.0
    gap_max: float = 0.0
    busy: BusyMeter = field(default_factory=BusyMeter)


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    # finished or failed
    state: str
    cause: str
    # It finished before its last configured step, because nothing is left to learn.
    solved: bool
    # Why environments that were to be trained on are suspended, by name.
    suspended_environments: dict[str, str]


class RunRecorder:
    """Writes the files of a run folder; one per run."""

    def __init__(
        self, folder: Path, config: Config, trackers: Trackers, texts: TokenTexts | None
    ) -> None:
        """`trackers` get the numbers of each step and round; `close` closes them.

        With `texts`, what is kept of episodes of several turns tells them apart.
        """
        self._folder = folder
        self._config = config
        earlier = whole_rows(folder / "metrics.jsonl")
        whole_rows(folder / "trajectories.jsonl")
        (folder / "summary.json").unlink(missing_ok=True)
        self._metrics: IO[str] = (folder / "metrics.jsonl").open("a", buffering=1)
        self._samples: IO[str] = (folder / "trajectories.jsonl").open("a", buffering=1)
        self._trackers = trackers
        self._texts = texts
        # Time goes on where the last row of an earlier start has it.
        self._started_s = time.time() - max((row["wall_s"] for row in earlier), default=0.0)
        self.rate = GenerationRate()
        self._last_step_s = time.time()
        self.rows: list[dict[str, float]] = [row for row in earlier if "step" in row]
        self.facts = RunFacts()

    def restore(self, history: RunHistory) -> None:
        """Takes over what adds up over the run."""
        facts = self.facts
        lives = history.servers.values()
        self.rate.earlier = sum(max(life.generated, life.received) for life in lives)
        facts.busy.earlier = history.busy
        facts.lag_counts.update(history.lags)
        facts.with_several_versions = history.with_several_versions
        for row in self.rows:
            facts.reward_by_step.append(row["reward_mean"])
            self._count_gap(row)

    def has_row(self, version: int) -> bool:
        """Whether the line of the step that makes `version` is written already."""
        return any(row["step"] == version for row in reversed(self.rows))

    def close(self) -> None:
        """Flushes all files; blocks until the trackers are done."""
        self._metrics.close()
        self._samples.close()
        self._trackers.close()

    def server_report(self, report: fleet_pb2.ServerReport) -> None:
        """Notes when an engine was busy."""
        intervals = [(span.start_s, span.end_s) for span in report.busy_intervals]
        self.facts.busy.generated(intervals)
        if intervals:
            self.rate.began(intervals[0][0])

    def step(
        self,
        batch: Batch,
        metrics: Mapping[str, float],
        *,
        training: Interval,
        generated_tokens: int,
        gauges: Mapping[str, float],
    ) -> dict[str, float]:
        """Writes the line of one step and returns it."""
        now = time.time()
        elapsed = max(now - self._last_step_s, 1e-9)
        self._last_step_s = now
        row = {
            "step": float(batch.version),
            "wall_s": now - self._started_s,
            **batch_statistics(batch.trajectories),
            **metrics,
            **gauges,
            "step_s": elapsed,
            "generated_tokens_per_s": self.rate.at(now, generated_tokens),
            "trained_tokens_per_s": metrics.get("trained_tokens", 0.0) / elapsed,
            "training_s": training[1] - training[0],
        }
        row |= environment_means(batch.trajectories)
        self._count(batch, row, training)
        self.rows.append(row)
        self._metrics.write(json.dumps(_finite(row)) + "\n")
        self._trackers.log(batch.version, row)
        if batch.step % self._config.controller.sample_every_steps == 0:
            self._sample(batch)
        return row

    def evaluation(self, result: EvaluationResult) -> None:
        """Writes the result of one evaluation."""
        numbers = {
            "reward_heldout": result.reward_mean,
            "evaluation_s": result.wall_s,
            **{
                f"{evaluation}/{name}": value
                for evaluation, values in result.evaluations.items()
                for name, value in values.items()
            },
        }
        row = {
            "evaluation_step": result.step,
            "wall_s": time.time() - self._started_s,
            "num_episodes": result.num_episodes,
            "num_failed": result.num_failed,
            **numbers,
        }
        self._metrics.write(json.dumps(_finite(row)) + "\n")
        self._trackers.log(result.step, numbers)

    def summary(
        self,
        *,
        ledger: status_pb2.Ledger,
        filtered_groups: int,
        evaluations: list[EvaluationResult],
        publish: Mapping[str, float],
        weight_digest: str,
        trainer_ranks: int,
        ending: Ending,
    ) -> dict[str, JsonValue]:
        """Everything that people ask first about a finished run; also written to summary.json."""
        facts, rewards = self.facts, self.facts.reward_by_step
        heldout = [result.reward_mean for result in evaluations]
        summary: dict[str, JsonValue] = {
            "run": self._config.run.name,
            **asdict(ending),
            "steps": len(rewards),
            "reward_first": _mean(rewards[:EDGE_STEPS]),
            "reward_last": _mean(rewards[-EDGE_STEPS:]),
            "reward_heldout_first": heldout[0] if heldout else None,
            "reward_heldout": heldout[-1] if heldout else None,
            "reward_heldout_first_step": evaluations[0].step if evaluations else None,
            "reward_heldout_step": evaluations[-1].step if evaluations else None,
            "evaluations": (
                {name: _finite(values) for name, values in evaluations[-1].evaluations.items()}
                if evaluations
                else {}
            ),
            "max_staleness": self._config.algorithm.max_staleness,
            "max_lag_seen": max(facts.lag_counts, default=0),
            "tokens_by_lag": {str(lag): n for lag, n in sorted(facts.lag_counts.items())},
            "trajectories_with_several_versions": facts.with_several_versions,
            "generated_tokens": ledger.generated,
            "trained_tokens": ledger.trained,
            "ledger": {
                field.name: getattr(ledger, field.name) for field in ledger.DESCRIPTOR.fields
            },
            "filtered_groups": filtered_groups,
            **{name: value for name, value in publish.items()},
            "logprob_gap_mean": facts.gap_sum / facts.gap_tokens if facts.gap_tokens else None,
            "logprob_gap_max": facts.gap_max if facts.gap_tokens else None,
            "logprob_gap_tokens": facts.gap_tokens,
            "busy": dict(facts.busy.of_the_run().shares()),
            "resources": run_resources(self.rows, trainer_ranks=trainer_ranks),
            "weight_digest": weight_digest,
            "wall_s": time.time() - self._started_s,
        }
        finite = _finite(summary)
        (self._folder / "summary.json").write_text(json.dumps(finite, indent=2) + "\n")
        return finite

    def _count(self, batch: Batch, row: Mapping[str, float], training: Interval) -> None:
        facts = self.facts
        trajectories = batch.trajectories
        facts.reward_by_step.append(statistics.fmean(t.reward for t in trajectories))
        facts.with_several_versions += with_several_versions(batch)
        facts.lag_counts += token_lags(batch)
        self._count_gap(row)
        facts.busy.trained(training)
        # By then every server has reported, or was removed.
        facts.busy.settle(training[1] - 2 * self._config.controller.heartbeat_timeout_s)

    def _count_gap(self, row: Mapping[str, float]) -> None:
        facts = self.facts
        tokens = row.get("logprob_gap_tokens", 0.0)
        if tokens:
            facts.gap_sum += row["logprob_gap_mean"] * tokens
            facts.gap_tokens += tokens
            facts.gap_max = max(facts.gap_max, row["logprob_gap_max"])

    def _sample(self, batch: Batch) -> None:
        for group in batch.groups[:SAMPLED_GROUPS]:
            for trajectory in group.in_order()[:SAMPLED_MEMBERS]:
                line = readable(batch.version, trajectory, self._texts)
                self._samples.write(json.dumps(line) + "\n")


async def open_recorder(config: Config, events: EventLog) -> RunRecorder:
    """The recorder of a run, with the trackers and the tokenizer that its settings ask for."""
    texts = await open_token_texts(config, events)
    trackers = open_trackers(config, config.run_dir, events)
    return RunRecorder(config.run_dir, config, trackers, texts)


def whole_rows(path: Path) -> list[dict[str, float]]:
    """The lines of a file that a crash may have torn; the torn one is cut off."""
    if not path.exists():
        return []
    with path.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        file.truncate(whole)
    rows = [json.loads(line) for line in data[:whole].splitlines()]
    return [{k: math.nan if v is None else v for k, v in row.items()} for row in rows]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _finite(row: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    # JSON has no NaN.
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
