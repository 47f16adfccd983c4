"""Plants a fault into one group of a large step, and has `slipstream bisect` look for it.

Each case records a step of a tiny model by the trainer's own code and gives the search a bound
that lies half way to the recorded metric. Clean steps have a bound just below what they have, so
that any group may tip the balance and none is at fault. A search is right if it names the planted
group, and in a clean step none.

    export PYTHONPATH=tests:deploy
    python -m benchmarks.learner.group_search                # 1,000 groups, some 8 minutes
    python -m benchmarks.learner.group_search --groups 64    # a minute or two

Prints one table and writes benchmarks/results/group-search.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.machine.address import free_port
from slipstream.core.run_folder import CONFIG, METRICS
from slipstream.core.settings.config import Config
from slipstream.core.types import GroupId, Trajectory
from slipstream.learner.trainer import bisect
from slipstream.learner.trainer.batches.batch import Batch
from support.fakes.fake_controller import make_trajectory
from support.fakes.tiny_models import make_model_folder
from support.ranks.replay_ranks import VOCAB, record

from benchmarks.common import measure

GROUP_SIZE = 2
MAX_TOKENS = 8
MICRO_BATCH_TOKENS = 8192

Plant = Callable[[Trajectory], Trajectory]


def with_reward(reward: float) -> Plant:
    """A judge that once gives `reward`, where others give 0 or 1."""
    return lambda trajectory: dataclasses.replace(trajectory, reward=reward)


def in_other_scale(factor: float) -> Plant:
    """A judge that answers in another scale."""
    return lambda trajectory: dataclasses.replace(
        trajectory,
        reward=factor * (1 + trajectory.member),
    )


def with_logprobs(logprob: float) -> Plant:
    """A row with wrong log-probabilities of what was sampled."""

    def plant(trajectory: Trajectory) -> Trajectory:
        logprobs = np.full_like(trajectory.behavior_logprobs, logprob)
        return dataclasses.replace(trajectory, behavior_logprobs=logprobs)

    return plant


@dataclass(frozen=True)
class Case:
    """A step, the fault that is planted into it if any, and the metric that shows it."""

    name: str
    metric: str
    algorithm: dict[str, object] = field(default_factory=dict)
    plant: Plant | None = None
    # The fault is in all samples of the group.
    is_whole_group: bool = False


WITHOUT_STD: dict[str, object] = {"advantage": "dr_grpo"}
SAMPLER_RATIO: dict[str, object] = {
    "loss": "cispo",
    "loss_args": {"clip_low": 1.0, "clip_high": 1e6, "ratio": "behavior"},
    "weight": "none",
}
PLANTED = (
    Case("a reward of 10,000", "grad_norm", WITHOUT_STD, with_reward(1e4)),
    Case("a reward of -10,000", "loss", {"advantage": "rloo"}, with_reward(-1e4)),
    Case(
        "a judge in another scale",
        "grad_norm",
        WITHOUT_STD,
        in_other_scale(1e4),
        is_whole_group=True,
    ),
    Case(
        "a reward of 10,000, two mini-batches",
        "grad_norm",
        {**WITHOUT_STD, "mini_batches": 2},
        with_reward(1e4),
    ),
    Case(
        "a reward of 10,000, two epochs",
        "grad_norm",
        {**WITHOUT_STD, "epochs": 2},
        with_reward(1e4),
    ),
    Case("a row's log-probabilities", "importance_ratio_max", plant=with_logprobs(-12.0)),
    Case("a row's log-probabilities", "kl", plant=with_logprobs(-16.0)),
    Case(
        "a group's log-probabilities",
        "importance_ratio_max",
        {"loss": "gspo"},
        with_logprobs(-12.0),
        is_whole_group=True,
    ),
    Case("a group's log-probabilities", "kl", plant=with_logprobs(-14.0), is_whole_group=True),
    Case("a row's log-probabilities in the loss", "grad_norm", SAMPLER_RATIO, with_logprobs(-14.0)),
)
CLEAN = tuple(
    Case("none", metric, algorithm)
    for algorithm in ({}, WITHOUT_STD)
    for metric in ("grad_norm", "loss", "kl", "importance_ratio_max", "entropy")
)


@dataclass(frozen=True)
class Answer:
    """What the search said of one case."""

    case: Case
    condition: str
    planted_group: str
    named_group: str
    num_retrainings: int
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.named_group == self.planted_group


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=1000, help="groups of a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a folder or file in place of the results' own")
    arguments = parser.parse_args()
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder / "model")
        for number, case in enumerate([*PLANTED, *CLEAN]):
            seed = 1000 * arguments.seed + number
            answer = search(case, folder, num_groups=arguments.groups, seed=seed)
            print(row(answer), flush=True)
            answers.append(answer)
    lines = table(answers, arguments.groups)
    print("\n".join(lines))
    record_of_all = {"groups": arguments.groups, "table": lines}
    measure.write_result("group-search", record_of_all, arguments.out)


def search(case: Case, folder: Path, *, num_groups: int, seed: int) -> Answer:
    """Records a step with the case's fault, and looks for its group."""
    random = np.random.default_rng(seed)
    group = int(random.integers(num_groups)) if case.plant else -1
    batch = planted_batch(case, random, num_groups=num_groups, group=group)
    config = config_of(case, folder, f"run-{seed}", num_groups)
    config.run_dir.mkdir()
    launch_alone()
    record(config, [batch])
    row_of_step = json.loads((config.run_dir / METRICS).read_text())
    condition = condition_of(case, float(row_of_step[case.metric]))
    printed = io.StringIO()
    launch_alone()
    options = [f"--config={config.run_dir / CONFIG}", f"--metric={condition}", "--step=1"]
    begin = time.perf_counter()
    own_arguments = sys.argv
    sys.argv = ["bisect", *options]
    with contextlib.redirect_stdout(printed):
        bisect.main()
    # The result names the command by its arguments.
    sys.argv = own_arguments
    text = printed.getvalue()
    finding = re.search(r"found: group (\S+) of step", text)
    named_group = finding[1] if finding else ""
    # Retrainings behind the group's name look for a sample of it.
    before = text[: finding.start()] if finding else text
    return Answer(
        case,
        condition,
        planted_group=f"g{group:06d}" if case.plant else "",
        named_group=named_group,
        num_retrainings=len(re.findall(r"bisect: \d+\. with", before)),
        seconds=time.perf_counter() - begin,
    )


def planted_batch(
    case: Case,
    random: np.random.Generator,
    *,
    num_groups: int,
    group: int,
) -> Batch:
    """A first step's batch, in which the samples of `group` that the case names have its fault."""
    trajectories = []
    member = int(random.integers(GROUP_SIZE))
    for place in range(num_groups * GROUP_SIZE):
        trajectory = make_trajectory(
            random,
            group=place // GROUP_SIZE,
            member=place % GROUP_SIZE,
            step=0,
            vocab_size=VOCAB,
            max_tokens=MAX_TOKENS,
        )
        group_id = GroupId(f"g{place // GROUP_SIZE:06d}")
        trajectory = dataclasses.replace(trajectory, group_id=group_id)
        is_planted = place // GROUP_SIZE == group
        if case.plant and is_planted and (case.is_whole_group or trajectory.member == member):
            trajectory = case.plant(trajectory)
        trajectories.append(trajectory)
    return Batch(0, "batch-0", tuple(trajectories))


def config_of(case: Case, folder: Path, name: str, num_groups: int) -> Config:
    settings: dict[str, Any] = {
        "run": {"name": name, "steps": 1, "dir": str(folder)},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "sampling": {"max_reply_tokens": MAX_TOKENS // 2, "max_episode_tokens": MAX_TOKENS},
        "checkpoint": {"every_steps": 1},
        "learner": {"timeout_s": 300.0, "micro_batch_tokens": MICRO_BATCH_TOKENS},
        "algorithm": {
            "group_size": GROUP_SIZE,
            "groups_per_step": num_groups,
            "max_staleness": 1,
            "learning_rate": 1e-3,
            **case.algorithm,
        },
    }
    return parse_config(settings, source="benchmark")


def condition_of(case: Case, value: float) -> str:
    """A bound that the recorded metric breaks: by half of it, or in a clean step by a hair."""
    bound = value / 2 if case.plant else value - abs(value) * 1e-6
    if case.plant and value < 0:
        return f"{case.metric}<{bound!r}"
    return f"{case.metric}>{bound!r}"


def launch_alone() -> None:
    """Puts into the environment what torchrun does for a rank without others."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    host = "127.0.0.1"
    os.environ |= alone | {"MASTER_ADDR": host, "MASTER_PORT": str(free_port(host))}


def row(answer: Answer) -> str:
    cells = [
        answer.case.name,
        f"`{answer.case.metric}`",
        answer.named_group or "none",
        "yes" if answer.is_right else "**no**",
        str(answer.num_retrainings),
        f"{answer.seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(answers: Sequence[Answer], num_groups: int) -> list[str]:
    allowed = 2 + math.ceil(math.log2(num_groups))
    planted = [answer for answer in answers if answer.planted_group]
    clean = [answer for answer in answers if not answer.planted_group]
    num_right = sum(answer.is_right for answer in planted)
    num_false = sum(not answer.is_right for answer in clean)
    max_retrainings = max(answer.num_retrainings for answer in answers)
    return [
        f"| planted into one of {num_groups:,} groups | metric | named | right | retrainings | s |",
        "|---|---|---|---|---|---|",
        *map(row, answers),
        "",
        f"{num_right} of {len(planted)} planted groups are named, "
        f"and {num_false} of {len(clean)} clean steps have a false name, "
        f"with at most {max_retrainings} retrainings ({allowed} are allowed).",
    ]


if __name__ == "__main__":
    main()
