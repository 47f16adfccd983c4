"""Writes the results of a run: metrics of each step, sampled trajectories and the summary."""

import asyncio
import contextlib
import json
import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue
from slipstream.core.run_folder import GROUPS, METRICS, SAMPLES, SUMMARY
from slipstream.core.settings.config import Config
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.reporting.summary import (
    GenerationRate,
    RunFacts,
    TokenTexts,
    group_line,
    open_token_texts,
    readable,
)
from slipstream.learner.controller.reporting.trackers import (
    ResultFile,
    Trackers,
    drop_torn_line,
    open_trackers,
    read_rows,
    write_result,
)
from slipstream.learner.controller.trajectories.batch import (
    FormedBatch,
    batch_statistics,
    environment_means,
    equal_rewards,
)
from slipstream.v1 import fleet_pb2, status_pb2

MIN_SAMPLED_GROUPS = 2
SAMPLED_MEMBERS = 4


class RunRecorder:
    """Writes the result files of a run folder; a run has one recorder."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        trackers: Trackers,
        texts: TokenTexts | None,
        events: EventLog,
    ) -> None:
        """Opens the files; `trackers` get the numbers of each step and evaluation round.

        `close` closes the trackers. `events` gets hints and warnings. With `texts`, sampled
        episodes of several turns list the text of each turn.
        """
        self._folder, self._config, self._trackers = folder, config, trackers
        self._texts, self._warn = texts, events.warn
        with contextlib.suppress(OSError):
            (folder / SUMMARY).unlink()
        for name in (METRICS, SAMPLES, GROUPS):
            drop_torn_line(folder / name, self._warn)
        self._metrics = ResultFile(folder / METRICS, self._warn)
        self.facts = RunFacts()
        # The row of the newest step.
        self.newest: dict[str, float] = {}
        # A byte for each version: 1 when the row of the step that makes it is written.
        self._written = bytearray()
        # The run's seconds continue from the last row of the earlier start.
        wall_s = 0.0
        for row in read_rows(folder / METRICS, self._warn):
            wall_s = max(wall_s, row["wall_s"])
            if "step" in row:
                self._note_row(row)
        self._started_s = time.monotonic() - wall_s
        self._samples = ResultFile(folder / SAMPLES, self._warn)
        self._groups = ResultFile(folder / GROUPS, self._warn)
        self.rate = GenerationRate()
        self._last_step_s = time.monotonic()

    def _note_row(self, row: dict[str, float]) -> None:
        version = int(row["step"])
        self._written.extend(bytes(max(0, version + 1 - len(self._written))))
        self._written[version] = 1
        self.newest = row
        self.facts.count_row(row)

    def has_row(self, version: int) -> bool:
        """Whether the row of the step that makes version `version` is already written."""
        return version < len(self._written) and self._written[version] == 1

    @property
    def since_step_s(self) -> float:
        return time.monotonic() - self._last_step_s

    def close(self) -> None:
        """Closes all files; blocks until the trackers are done, but only for a limited time."""
        self._close_files()
        self._trackers.close()

    def _close_files(self) -> None:
        for file in (self._metrics, self._samples, self._groups):
            file.close()

    def server_report(self, report: fleet_pb2.ServerReport) -> None:
        """Notes when the first engine began to generate, for the generation rate."""
        if report.busy_s:
            self.rate.began(time.monotonic() - report.busy_s)

    def step(
        self,
        batch: FormedBatch,
        metrics: Mapping[str, float],
        *,
        advantages: Sequence[float] = (),
        training: tuple[float, float],
        generated_tokens: int,
        gauges: Mapping[str, float],
    ) -> dict[str, float]:
        """Writes the row of one step, unless it is already written, and returns the row.

        `advantages` are the advantages of the first trajectories of the batch, in order; they are
        unknown for the other trajectories. `training` is the start and end of the step, in Unix
        seconds.
        """
        now = time.monotonic()
        elapsed = max(now - self._last_step_s, 1e-9)
        self._last_step_s = now
        own = {
            "step": float(batch.version),
            "wall_s": now - self._started_s,
            **batch_statistics(batch),
            **gauges,
            "step_s": elapsed,
            "generated_tokens_per_s": self.rate.at(now, generated_tokens),
            "trained_tokens_per_s": metrics.get("trained_tokens", 0.0) / elapsed,
            "training_s": training[1] - training[0],
        }
        if batch.given is None:
            own |= environment_means(batch.trajectories)
            own |= equal_rewards([group.in_order() for group in batch.groups], self._config)
        if (hidden := sorted(metrics.keys() & own.keys())) and not self.newest:
            told = f"the algorithm reports {', '.join(hidden)}, which the run measures itself"
            self._warn(f"{told}: name the report otherwise, it is left out")
        row = {**metrics, **own}
        if self.has_row(batch.version):
            # A crash left the row of a step whose journal record it lost.
            return row
        self._note_row(row)
        self._metrics.append(_line(_finite(row)))
        self._trackers.log(batch.version, row)
        # Behind the row: a crash between them loses samples, and writes none twice.
        if batch.step % self._config.controller.sample_every_steps == 0:
            self._keep_samples(batch, advantages)
        return row

    def _keep_samples(self, batch: FormedBatch, advantages: Sequence[float]) -> None:
        ids = [trajectory.trajectory_id for trajectory in batch.trajectories]
        known = dict(zip(ids, advantages, strict=False))
        lines = [
            _finite(readable(batch.version, each, self._texts, known.get(each.trajectory_id)))
            for group in sampled_groups(batch.groups)
            for each in group.in_order()[:SAMPLED_MEMBERS]
        ]
        self._samples.append(b"".join(map(_line, lines)))
        groups = [group_line(batch.version, group.in_order()) for group in batch.groups]
        self._groups.append(b"".join(map(_line, groups)))
        self._trackers.samples(batch.version, lines, groups)

    def evaluation(self, result: kinds.Evaluation) -> None:
        """Writes the result of one evaluation round."""
        mean = result.reward_mean
        numbers = {
            "reward_heldout": math.nan if mean is None else mean,
            "evaluation_s": result.wall_s,
            **{
                f"{evaluation}/{name}": value
                for evaluation, values in result.evaluations.items()
                for name, value in values.items()
            },
        }
        row = {
            "evaluation_step": result.version,
            "wall_s": time.monotonic() - self._started_s,
            "num_episodes": result.episodes,
            "num_failed": result.failed,
            **numbers,
        }
        self._metrics.append(_line(_finite(row)))
        self._trackers.log(result.version, numbers)

    def summary(
        self,
        *,
        ledger: status_pb2.Ledger,
        state: RunState,
        publish: Mapping[str, float],
        weight_digest: str,
        ending: Mapping[str, JsonValue],
    ) -> dict[str, JsonValue]:
        """Writes summary.json, the main facts of an ended run, and returns its content.

        `state` is that of the journal; `ending` has the final state of the run and its cause.
        """
        facts, evaluations = self.facts, state.evaluations
        heldout = [result.reward_mean for result in evaluations]
        first_rewards, last_rewards = facts.edge_rewards(state.version.step)
        summary: dict[str, JsonValue] = {
            "run": self._config.run.name,
            **ending,
            "steps": state.version.step,
            "reward_first": _mean(first_rewards),
            "reward_last": _mean(last_rewards),
            "reward_steps": len(last_rewards),
            "reward_heldout_first": heldout[0] if heldout else None,
            "reward_heldout": heldout[-1] if heldout else None,
            "reward_heldout_first_step": evaluations[0].version if evaluations else None,
            "reward_heldout_step": evaluations[-1].version if evaluations else None,
            "evaluations": (
                {name: _finite(values) for name, values in evaluations[-1].evaluations.items()}
                if evaluations
                else {}
            ),
            "max_staleness": self._config.algorithm.max_staleness,
            "max_lag_seen": max(state.lags, default=0),
            "tokens_by_lag": {str(lag): n for lag, n in sorted(state.lags.items())},
            "trajectories_with_several_versions": state.with_several_versions,
            "generated_tokens": ledger.generated,
            "trained_tokens": ledger.trained,
            "ledger": {
                **{field.name: getattr(ledger, field.name) for field in ledger.DESCRIPTOR.fields},
                "gaps": list(ledger.gaps),
            },
            "filtered_groups": state.filtered_groups.total(),
            "set_aside_batches": len(state.set_aside),
            "gradient_overflows": facts.gradient_overflows,
            **publish,
            "logprob_gap_mean": facts.gap_sum / facts.gap_tokens if facts.gap_tokens else None,
            "logprob_gap_max": facts.gap_max if facts.gap_tokens else None,
            "logprob_gap_tokens": facts.gap_tokens,
            "time": facts.time_shares(),
            "weight_digest": weight_digest,
            "wall_s": time.monotonic() - self._started_s,
        }
        finite = _finite(summary)
        text = json.dumps(finite, indent=2)
        write_result(self._folder / SUMMARY, f"{text}\n".encode(), self._warn)
        # Closing adds events about lost lines while clients still follow the events.
        self._close_files()
        return finite


async def open_recorder(config: Config, events: EventLog) -> RunRecorder:
    """Opens the recorder of a run, with the trackers and the tokenizer that its settings need."""
    texts = await open_token_texts(config, events)
    loop = asyncio.get_running_loop()

    def complain(text: str) -> None:
        loop.call_soon_threadsafe(events.warn, text)

    trackers = open_trackers(config, config.run_dir, complain)
    return RunRecorder(config.run_dir, config, trackers, texts, events)


def sampled_groups(groups: Sequence[Group]) -> list[Group]:
    """Returns groups to record: the first of each environment, and others up to two in total."""
    first: dict[str, Group] = {}
    for group in groups:
        first.setdefault(group.environment, group)
    chosen = list(first.values())
    others = [group for group in groups if group not in chosen]
    return chosen + others[: max(0, MIN_SAMPLED_GROUPS - len(chosen))]


def _line(values: Mapping[str, JsonValue]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _mean(values: Collection[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _finite(row: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    # JSON has no NaN.
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
