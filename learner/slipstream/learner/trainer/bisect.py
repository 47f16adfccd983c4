"""Finds the group of a run whose training broke a bound of a metric, and the sample in it.

torchrun starts each rank as `python -m slipstream.learner.trainer.bisect --config FILE`. The model
is loaded once, and the steps before the suspects are trained once as they were. Each trial begins
with that state and trains the recorded batches without some groups, as the trainer trains them.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from slipstream.core.configuration.replayed_settings import trial_problems
from slipstream.core.errors import USAGE_ERROR, ConfigError, RunFailed, SlipstreamError
from slipstream.core.machine.process import leave
from slipstream.core.recorded_metrics import MetricCondition
from slipstream.core.settings.config import Config
from slipstream.learner.controller.records.batch_files import StoredBatch
from slipstream.learner.trainer.group_search import Culprit, GroupSearch, Inconclusive, SearchTrial
from slipstream.learner.trainer.recorded_run import (
    RecordedRun,
    carry_out,
    check_replayable,
    load_settings,
    read_run,
)
from slipstream.protocol.codec import trajectory_from_pb
from slipstream.v1 import trainer_pb2, trajectory_pb2

# Fewest samples of a group among which one is looked for: halves of fewer compare nothing.
MIN_SAMPLES = 4
# The command shows lines that begin with this.
SHOWN_PREFIX = "bisect: "


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A group or one sample of it, in the batch of a step from 1."""

    step: int
    group_id: str
    # The number of the sample in its group; None for the whole group.
    member: int | None = None

    def __str__(self) -> str:
        return self.group_id if self.member is None else f"sample {self.member}"


@dataclasses.dataclass(frozen=True)
class Remainder:
    """A recorded batch without some of its groups and samples; see `Contents`."""

    batch: StoredBatch
    left_out: Collection[Suspect]

    @property
    def header(self) -> trainer_pb2.BatchHeader:
        return self.batch.header

    @property
    def trajectories(self) -> Iterator[trajectory_pb2.Trajectory]:
        left_out = {(suspect.group_id, suspect.member) for suspect in self.left_out}
        for trajectory in self.batch.trajectories:
            group_id = trajectory.group_id
            if left_out.isdisjoint({(group_id, None), (group_id, trajectory.member)}):
                yield trajectory

    @property
    def passes(self) -> Iterator[trainer_pb2.Pass]:
        return self.batch.passes


def main() -> int:
    """Looks for the group; returns 0 if it was found, 1 if nothing can be concluded.

    It returns 2 if the run's steps cannot be trained again, and 3 if a step failed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.toml of the run folder")
    parser.add_argument("--metric", required=True, help="such as loss>3")
    parser.add_argument("--step", type=int, required=True, help="the step of the metric")
    parser.add_argument("--from", dest="first", type=int, help="the first step under suspicion")
    parser.add_argument("overrides", nargs="*", help="settings that replace those of the file")
    arguments = parser.parse_args()
    first = arguments.step if arguments.first is None else arguments.first
    try:
        condition = MetricCondition.parse(arguments.metric)
        config = load_settings(arguments.config, arguments.overrides)
        for problem in trial_problems(config):
            raise ConfigError(problem)
        check_replayable(config)
        run = read_run(config.run_dir, first=first, last=arguments.step)
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    return carry_out(lambda: Bisection(config, run, condition, first=first).result())


class Bisection:
    """Trains steps without groups on this rank; every method is collective, and rank 0 prints."""

    def __init__(
        self,
        config: Config,
        run: RecordedRun,
        condition: MetricCondition,
        *,
        first: int,
    ) -> None:
        """Loads the model and trains the steps before `first` as they were.

        The groups of the other steps are suspects; `condition` is on a metric of the last one.
        """
        from slipstream.learner.trainer.opening import open_policy
        from slipstream.learner.trainer.ranks.parallel import Launch
        from slipstream.learner.trainer.training_line import TrainingLine

        self._condition = condition
        self._mini_batches = config.algorithm.mini_batches
        self._policy = open_policy(config, Launch.from_environment())
        self._line = TrainingLine(self._policy, config)
        if run.start:
            self._line.load(run.start)
        place = first - 1 - run.start
        for recorded in run.steps[:place]:
            self._line.train(recorded.batch)
        self._state = self._line.hold()
        # The batches under suspicion by their steps, which count from 1.
        self._batches = {step.header.step + 1: step.batch for step in run.steps[place:]}
        self._last = max(self._batches)
        # Advantages among all groups, by trajectory_id; samples outside the loss have none.
        self._advantages: dict[str, float] = {}

    def result(self) -> int:
        """Prints the group at fault and its samples; returns 0, or 1 if none can be named."""
        groups: list[Suspect] = []
        for step, batch in self._batches.items():
            names = dict.fromkeys(message.group_id for message in batch.trajectories)
            groups.extend(Suspect(step, name) for name in names)
        first = groups[0].step
        steps = f"step {first}" if first == self._last else f"steps {first} to {self._last}"
        max_trials = 2 + math.ceil(math.log2(len(groups)))
        self._say(
            f"{self._condition} in step {self._last}: {len(groups)} groups of {steps} are suspects"
            f", at most {max_trials} retrainings"
        )
        try:
            search = self._search(groups, [])
            culprit = search.culprit()
            group = groups[culprit.place]
            self._check_prominence(culprit, group.group_id, "group")
        except Inconclusive as reason:
            self._say(f"no group is named: {reason}")
            if first == self._last:
                self._say("--from STEP makes groups of earlier steps suspects, too")
            self._policy.ranks.close()
            return 1
        samples = self._samples(group)
        environment = samples[0].environment
        self._say(
            f"found: group {group.group_id} of step {group.step}, environment {environment}: "
            f"without it {self._condition.metric} is {culprit.value:.6g}, with it "
            f"{search.trials[0].value:.6g} ({_times(culprit)})"
        )
        for sample in samples:
            self._say(f"  {self._described(sample)}")
        self._find_sample(group, samples, search.trials[0])
        self._policy.ranks.close()
        return 0

    def _find_sample(
        self,
        group: Suspect,
        samples: Sequence[trajectory_pb2.Trajectory],
        baseline: SearchTrial,
    ) -> None:
        """Prints the sample of the group whose absence alone heals the metric, if there is one."""
        if len(samples) < MIN_SAMPLES:
            self._say(
                f"no sample is named: {len(samples)} of a group are too few to leave out halves"
            )
            return
        suspects = [Suspect(group.step, group.group_id, sample.member) for sample in samples]
        try:
            search = self._search(suspects, [baseline])
            culprit = search.culprit()
            sample = samples[culprit.place]
            self._check_prominence(culprit, f"sample {sample.member}", "sample")
        except Inconclusive as reason:
            self._say(f"no sample is named: {reason}")
            return
        self._say(
            f"found: sample {sample.member}, reward {sample.reward:g}: without it alone "
            f"{self._condition.metric} is {culprit.value:.6g} ({_times(culprit)})"
        )

    def _search(self, suspects: Sequence[Suspect], trials: list[SearchTrial]) -> GroupSearch:
        """Returns a search among groups or samples that begins with `trials`."""
        sizes = {
            step: len({message.group_id for message in batch.trajectories})
            for step, batch in self._batches.items()
        }

        def may_leave_out(places: Sequence[int]) -> bool:
            left_out = [suspects[place] for place in places]
            for step, size in sizes.items():
                of_step = [suspect for suspect in left_out if suspect.step == step]
                remaining = size - sum(suspect.member is None for suspect in of_step)
                is_skipped = remaining == 0 and step != self._last
                if of_step and remaining < self._mini_batches and not is_skipped:
                    return False
            return True

        def train(places: Sequence[int]) -> float:
            left_out = [suspects[place] for place in places]
            return self._train(left_out, number=len(search.trials) + 1)

        search = GroupSearch(
            condition=self._condition,
            batches=[suspect.step for suspect in suspects],
            train=train,
            may_leave_out=may_leave_out,
            trials=trials,
        )
        return search

    def _train(self, left_out: Sequence[Suspect], *, number: int) -> float:
        """Trains all steps under suspicion without `left_out`; returns the last one's metric.

        Raises Inconclusive if a step cannot be trained, or gives no such metric.
        """
        self._line.restore(self._state)
        extent = "with all groups"
        if left_out:
            extent = f"without {left_out[0]}"
        if len(left_out) > 1:
            extent = f"without {len(left_out)}, {left_out[0]} to {left_out[-1]}"
        metrics: dict[str, float] = {}
        for step, batch in self._batches.items():
            of_step = [suspect for suspect in left_out if suspect.step == step]
            remainder = Remainder(batch, of_step)
            if not any(True for _ in remainder.trajectories):
                # A step without groups leaves the weights as they are.
                continue
            try:
                result = self._line.train(remainder)
            except RunFailed as error:
                raise Inconclusive(f"step {step} cannot be trained {extent}: {error}") from error
            metrics = result.metrics
            if not left_out:
                self._advantages |= result.advantages
        name = self._condition.metric
        value = metrics.get(name)
        if value is None:
            names = ", ".join(metrics)
            raise Inconclusive(f"training {extent} gives no {name}; it gives {names}")
        self._say(f"{number}. {extent}: {name} {value:.6g}")
        return value

    def _check_prominence(self, culprit: Culprit, name: str, kind: str) -> None:
        """Raises Inconclusive unless the culprit stands out among the others."""
        if culprit.stands_out:
            return
        metric = self._condition.metric
        healed = f"without {name} alone {metric} is {culprit.value:.6g}"
        if math.isnan(culprit.prominence):
            raise Inconclusive(f"{healed}, but there are too few to compare it with")
        raise Inconclusive(
            f"{healed}, but that is {_times(culprit)}: the {metric} is so near to the bound that "
            f"leaving out another {kind} may heal it as well"
        )

    def _samples(self, group: Suspect) -> list[trajectory_pb2.Trajectory]:
        batch = self._batches[group.step]
        return [message for message in batch.trajectories if message.group_id == group.group_id]

    def _described(self, sample: trajectory_pb2.Trajectory) -> str:
        num_tokens = sum(sample.run_lengths[1::2])
        advantage = self._advantages.get(trajectory_from_pb(sample).trajectory_id)
        weight = "left out of the loss"
        if advantage is not None:
            weight = f"advantage {advantage:.4g}"
        return f"sample {sample.member}: reward {sample.reward:g}, {weight}, {num_tokens} tokens"

    def _say(self, line: str) -> None:
        if self._policy.ranks.is_main:
            print(f"{SHOWN_PREFIX}{line}", flush=True)


def _times(culprit: Culprit) -> str:
    if math.isinf(culprit.prominence):
        return "others do not change it at all"
    return f"{culprit.prominence:.1f} times the spread of the others"


if __name__ == "__main__":
    leave(main())
