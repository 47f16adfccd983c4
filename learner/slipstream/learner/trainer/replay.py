"""Trains a run again from its journal, as it was or with other settings beside that.

torchrun starts each rank as `python -m slipstream.learner.trainer.replay --config FILE`. The replay
is a plain loop over the recorded batches, without a controller or rollout servers. On a CPU every
version must get the digest that is in the journal. Where a version gets another one, the metrics of
its step stand beside the recorded ones, and the change of its weights beside that of a checkpoint.

With other settings each batch is trained twice, by two lines that begin with the same state: one
has the run's settings and one the others. Each goes on from its own weights.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.core.configuration.replayed_settings import (
    comparison_problems,
    trial_problems,
)
from slipstream.core.errors import USAGE_ERROR, ConfigError, SlipstreamError
from slipstream.core.machine.process import leave
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.recorded_run import (
    RecordedRun,
    RecordedStep,
    carry_out,
    check_replayable,
    load_settings,
    read_run,
)

if TYPE_CHECKING:
    from slipstream.learner.trainer.weight_changes import Weights

# Relative difference from which two values of a metric are shown.
SHOWN_DIFFERENCE = 1e-6


def main() -> int:
    """Replays a run; returns 1 if a digest differs from the recorded one on a CPU, else 0.

    It returns 2 if the run cannot be replayed, and 3 if a step failed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.toml of the run folder")
    parser.add_argument("--from", dest="first", type=int, help="the first step with --other")
    parser.add_argument("--to", dest="last", type=int, help="the last step")
    parser.add_argument("--other", action="append", default=[], help="a setting to compare with")
    parser.add_argument("overrides", nargs="*", help="settings that replace those of the file")
    arguments = parser.parse_args()
    changed: Config | None = None
    try:
        config = load_settings(arguments.config, arguments.overrides)
        check_replayable(config)
        if arguments.other:
            overrides = [*arguments.overrides, *arguments.other]
            changed = load_settings(arguments.config, overrides)
            for problem in comparison_problems(config, changed):
                raise ConfigError(problem)
        run = read_run(config.run_dir, first=arguments.first, last=arguments.last)
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    first = run.start + 1 if arguments.first is None else arguments.first
    return carry_out(lambda: Replay(config, run).result(changed, first=first))


class Replay:
    """Trains recorded steps on this rank; every method is collective, and rank 0 prints."""

    def __init__(self, config: Config, run: RecordedRun) -> None:
        from slipstream.learner.trainer.opening import open_policy
        from slipstream.learner.trainer.ranks.parallel import Launch
        from slipstream.learner.trainer.training_line import TrainingLine
        from slipstream.learner.trainer.weights.weight_publisher import open_published

        self._run = run
        self._config = config
        self._policy = open_policy(config, Launch.from_environment())
        self._line = TrainingLine(self._policy, config)
        if run.start:
            self._line.load(run.start)
        self._published = open_published(self._policy, config)
        # Versions that got other digests than the recorded ones.
        self._num_different = 0

    def result(self, changed: Config | None, *, first: int) -> int:
        """Trains all steps, those from step `first` on also by the settings `changed`, if any.

        Returns 1 if a version gets its recorded digest by neither on a CPU, else 0: sums on a GPU
        have no fixed order.
        """
        ranks = self._policy.ranks
        if changed is None:
            self._train_as_recorded()
        else:
            self._train_beside(changed, first)
        ranks.close()
        if not self._num_different:
            return 0
        is_exact = ranks.device.type != "cuda"
        cause = "as they may on a GPU, whose sums have no fixed order"
        if is_exact:
            cause = (
                "by other packages, parallel sizes or settings: all steps have those of the last "
                "start"
            )
        # The command shows lines that begin with this word.
        self._say(f"version digests that differ: {self._num_different}, {cause}")
        return int(is_exact)

    def _train_as_recorded(self) -> None:
        from slipstream.learner.trainer.weight_changes import host_weights

        may_look_aside = not any(trial_problems(self._config))
        checkpoints = self._run.checkpoints if may_look_aside else {}
        start = host_weights(self._policy) if checkpoints else {}
        for recorded in self._run.steps:
            result = self._line.train(recorded.batch)
            version = recorded.header.step + 1
            if self._compare_digest(recorded) or recorded.digest is None:
                continue
            if metrics := self._run.metrics.get(version):
                self._say(f"version {version}: {beside(result.metrics, metrics)}")
            if version in checkpoints:
                self._compare_checkpoint(version, start)

    def _compare_digest(self, recorded: RecordedStep) -> bool:
        """Prints the digest of the weights; returns whether it is the recorded one."""
        digest = self._digest()
        is_same = digest == recorded.digest
        verdict = "as recorded" if is_same else f"recorded {recorded.digest or 'nowhere'}"
        self._say(f"version {recorded.header.step + 1}  {digest}  {verdict}")
        self._num_different += not is_same and recorded.digest is not None
        return is_same

    def _compare_checkpoint(self, version: int, start: "Weights") -> None:
        """Prints how the change since `start`, the first weights, is like that of a checkpoint."""
        from slipstream.learner.trainer.weight_changes import (
            ChangeLikeness,
            WeightChange,
            host_weights,
        )

        change = WeightChange(start, host_weights(self._policy))
        state = self._line.hold()
        self._line.load_weights(version)
        recorded_change = WeightChange(start, host_weights(self._policy))
        self._line.restore(state)
        likeness = ChangeLikeness.between(change, recorded_change)
        self._say(
            f"version {version}: change since version {self._run.start} beside that of the "
            f"checkpoint: {likeness}"
        )

    def _train_beside(self, changed: Config, first: int) -> None:
        """Trains steps before `first` as they were, and the others by both settings in turn."""
        from slipstream.learner.trainer.branch import TrainingBranch
        from slipstream.learner.trainer.training_line import TrainingLine
        from slipstream.learner.trainer.weight_changes import (
            ChangeLikeness,
            WeightChange,
        )

        changed_line = TrainingLine(self._policy, changed)
        place = first - 1 - self._run.start
        for recorded in self._run.steps[:place]:
            self._line.train(recorded.batch)
            self._compare_digest(recorded)
        original = TrainingBranch(self._policy, self._line)
        other = original.fork(changed_line)
        start = original.weights
        for recorded in self._run.steps[place:]:
            original_step = original.train(recorded.batch)
            original_digest = self._digest()
            step = other.train(recorded.batch)
            digest = self._digest()
            likeness = ChangeLikeness.between(step.change, original_step.change)
            whole_likeness = ChangeLikeness.between(
                WeightChange(start, other.weights),
                WeightChange(start, original.weights),
            )
            version = recorded.header.step + 1
            verdict = "as recorded" if digest == recorded.digest else "by the other settings"
            self._say(f"version {version}  {digest}  {verdict}")
            self._say(f"version {version}: change by step {version}: {likeness}")
            self._say(f"version {version}: change since version {first - 1}: {whole_likeness}")
            self._say(f"version {version}: {beside(step.metrics, original_step.metrics)}")
            if recorded.digest not in (original_digest, None):
                # Settings of an earlier start of the run may stand beside those of the last one.
                self._num_different += digest != recorded.digest
                self._say(
                    f"version {version}: the run's own settings give {original_digest} here, "
                    f"recorded {recorded.digest}"
                )

    def _digest(self) -> str:
        """Returns the digest of the weights in hexadecimal, on every rank."""
        ranks = self._policy.ranks
        identity = self._published.digests().identity
        own_identity = identity if ranks.is_main else None
        return ranks.broadcast_bytes(own_identity).hex()

    def _say(self, line: str) -> None:
        if self._policy.ranks.is_main:
            print(line, flush=True)


def beside(metrics: Mapping[str, float], originals: Mapping[str, float]) -> str:
    """Returns the metrics that differ from the original ones, as `loss 0.5 for 0.4, ...`.

    Seconds and bytes are of the machine and left out, as are metrics that one side lacks.
    """
    differing: list[str] = []
    for name, value in metrics.items():
        original = originals.get(name)
        if original is None or name.endswith(("_s", "_bytes")):
            continue
        if not math.isclose(value, original, rel_tol=SHOWN_DIFFERENCE, abs_tol=0.0):
            differing.append(f"{name} {value:.6g} for {original:.6g}")
    return ", ".join(differing) or "equal metrics"


if __name__ == "__main__":
    leave(main())
