"""A run of agents whose servers, workers and controller are killed: `python -m` this module.

    PYTHONPATH=tests python -m support.rigs.recovered_run --folder F --turns 20 --steps 25 \
        --every-s 25

It plays a quiet run of the same tasks first, then the run with kills, and prints a line of JSON.
"""

import argparse
import asyncio
import json
import random
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.client.verify import examine

from support.fakes import counted_turns
from support.fakes.tiny_models import make_model_folder
from support.rigs.run_processes import (
    CONTROLLER,
    ROLLOUT_SERVER,
    WORKER,
    Command,
    command,
    kill,
    summary_of,
    trained_trajectories,
    write_config,
)
from support.rigs.smallest_run import SMALLEST

ROLES = {"server": ROLLOUT_SERVER, "worker": WORKER, "controller": CONTROLLER}
GROUP_SIZE = 4
# Seconds without a line behind which an unfinished course is taken for left, not for lost at the
# end of the run.
OPEN_S = 60.0


@dataclass(frozen=True)
class Course:
    """What programs read that began with one reply: the tokens of each turn, by the answer's id."""

    turns: dict[str, tuple[int, int]]
    newest_s: float

    @property
    def num_turns(self) -> int:
        return len({turn for turn, _ in self.turns.values()})

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.turns.values())


@dataclass(frozen=True)
class Played:
    """What a run and its programs' notes say."""

    kills: dict[str, int]
    episodes: int
    trained_tokens: int
    # Courses that were not taken to their end long before the run's end, and two answers to one
    # turn: tokens that a program had read and that were sampled again.
    sampled_twice: int
    recovered_calls: int
    recovered_tokens: int
    unasked_calls: int
    episodes_recovered: int
    trained_twice: int
    ledger: dict[str, int]
    faults: list[str]
    wall_s: float
    # The rewards of trained episodes by task.
    rewards: dict[int, list[float]]


def config_of(
    folder: Path,
    model: Path,
    *,
    turns: int,
    steps: int,
    groups: int,
    recover: bool,
    pause_s: float,
) -> Path:
    """Writes the settings of a run with two servers."""
    shutil.copy(counted_turns.__file__, folder / "user_agents.py")
    arguments = {"notes": str(folder / "notes"), "turns": turns, "pause_s": pause_s}
    entry = {
        "name": "turns",
        "reference": "user_agents:CountedTurns",
        "args": arguments,
        "timeout_s": 120.0,
        "num_workers": 2,
    }
    return write_config(
        folder,
        model,
        base=SMALLEST,
        run__steps=steps,
        environments=[entry],
        agents={"recover": recover},
        # A lost process is no fault of an episode.
        controller__max_attempts=100,
        rollout_server={"count": 2, "max_episodes": 64},
        algorithm={
            "group_size": GROUP_SIZE,
            "groups_per_step": groups,
            "learning_rate": 1e-9,
        },
        sampling={
            "max_reply_tokens": 8,
            "max_episode_tokens": 128,
            "max_total_tokens": 4000,
            "max_branches": turns,
        },
    )


def courses(notes: Path) -> dict[str, Course]:
    """Returns the courses of a run's programs, by the id of their first answer."""
    turns: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    newest_s: Counter[str] = Counter()
    for line in notes.read_text().splitlines():
        first, answer, turn, tokens, unix_s = json.loads(line)
        turns[first][answer] = (turn, tokens)
        newest_s[first] = max(newest_s[first], unix_s)
    return {first: Course(turns[first], newest_s[first]) for first in turns}


def sampled_twice(notes: Path, *, turns: int, ended_s: float) -> int:
    """Returns the tokens that a program had read and that were sampled again.

    A course that ends early was begun anew with other answers, unless it was open at the end.
    """
    tokens = 0
    for course in courses(notes).values():
        is_left = course.num_turns < turns and course.newest_s < ended_s - OPEN_S
        if is_left:
            tokens += course.tokens
        if len(course.turns) > course.num_turns:
            by_turn = Counter(turn for turn, _ in course.turns.values())
            repeated = {turn for turn, number in by_turn.items() if number > 1}
            tokens += sum(
                size for turn, size in course.turns.values() if turn in repeated
            )
    return tokens


async def play(
    folder: Path,
    model: Path,
    *,
    turns: int,
    steps: int,
    groups: int,
    every_s: float | None = None,
    every_replies: int | None = None,
    roles: Sequence[str] = tuple(ROLES),
    seed: int = 0,
    recover: bool = True,
    pause_s: float = 0.0,
    limit_s: float,
) -> Played:
    """Plays a run, with a kill -9 of a process of `roles` now and then from its first note on.

    Each `every_s` seconds one is drawn; or behind each `every_replies` replies all processes of the
    next role are killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config_of(
        folder,
        model,
        turns=turns,
        steps=steps,
        groups=groups,
        recover=recover,
        pause_s=pause_s,
    )
    began_s = time.monotonic()
    kills: Counter[str] = Counter()
    async with command(folder, "run", "config.toml", cwd=folder) as run:
        notes = folder / "notes"
        if every_replies is not None:
            course = _kill_by_replies(run, notes, kills, every_replies, roles)
        else:
            course = _kill_by_time(run, notes, kills, every_s, roles, seed)
        killing = asyncio.create_task(course)
        try:
            code = await run.wait(limit_s)
        finally:
            killing.cancel()
        assert code == 0, run.out + run.err
    ended_s = time.time()
    trajectories = trained_trajectories(folder / "run")
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        rewards[trajectory.task_index % counted_turns.NUM_TASKS].append(
            trajectory.reward
        )
    metrics = [trajectory.metrics for trajectory in trajectories]
    members = Counter(
        (trajectory.group_id, trajectory.member) for trajectory in trajectories
    )
    return Played(
        kills=dict(kills),
        episodes=len(trajectories),
        trained_tokens=sum(sum(t.run_lengths[1::2]) for t in trajectories),
        sampled_twice=sampled_twice(folder / "notes", turns=turns, ended_s=ended_s),
        recovered_calls=int(sum(m.get("recovered_calls", 0) for m in metrics)),
        recovered_tokens=int(sum(m.get("recovered_tokens", 0) for m in metrics)),
        unasked_calls=int(sum(m.get("unasked_calls", 0) for m in metrics)),
        episodes_recovered=sum(m.get("recovered_calls", 0) > 0 for m in metrics),
        trained_twice=sum(number - 1 for number in members.values()),
        ledger=summary_of(folder / "run")["ledger"],
        faults=examine(folder / "run").faults,
        wall_s=time.monotonic() - began_s,
        rewards=dict(rewards),
    )


async def _kill_by_time(
    run: Command,
    notes: Path,
    kills: Counter[str],
    every_s: float | None,
    roles: Sequence[str],
    seed: int,
) -> None:
    generator = random.Random(seed)
    while not notes.exists():
        await asyncio.sleep(0.2)
    while every_s is not None:
        await asyncio.sleep(every_s)
        role = generator.choice(list(roles))
        if processes := run.find(ROLES[role]):
            kill(generator.choice(processes))
            kills[role] += 1


async def _kill_by_replies(
    run: Command,
    notes: Path,
    kills: Counter[str],
    every_replies: int,
    roles: Sequence[str],
) -> None:
    for number, role in enumerate(roles, start=1):
        while not notes.exists() or _num_lines(notes) < number * every_replies:
            await asyncio.sleep(0.05)
        while not (processes := run.find(ROLES[role])):
            await asyncio.sleep(0.05)
        # One alone may have no episode.
        for process in processes:
            kill(process)
        kills[role] += len(processes)


def _num_lines(notes: Path) -> int:
    return notes.read_bytes().count(b"\n")


def unequal_rewards(quiet: Played, harmed: Played) -> int:
    """Returns how many trained episodes have another reward than their task had without kills."""
    unequal = 0
    for task, rewards in harmed.rewards.items():
        expected = set(quiet.rewards.get(task, rewards))
        unequal += sum(reward not in expected for reward in rewards)
    return unequal


def main() -> int:
    """Plays both runs; returns 1 if a token was sampled or an episode trained twice, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--every-s", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--without", action="store_true", help="agents.recover = false")
    parser.add_argument("--limit-s", type=float, default=3000.0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    model = make_model_folder(options.folder / "tiny")
    sizes = {
        "turns": options.turns,
        "groups": options.groups,
        "limit_s": options.limit_s,
    }
    quiet_steps = -(-counted_turns.NUM_TASKS // options.groups)
    quiet = asyncio.run(
        play(
            options.folder / "quiet",
            model,
            steps=min(quiet_steps, options.steps),
            every_s=None,
            recover=False,
            **sizes,
        )
    )
    harmed = asyncio.run(
        play(
            options.folder / "harmed",
            model,
            steps=options.steps,
            every_s=options.every_s,
            seed=options.seed,
            recover=not options.without,
            pause_s=options.pause_s,
            **sizes,
        )
    )
    figures = asdict(harmed)
    del figures["rewards"]
    figures |= {
        "unequal_rewards": unequal_rewards(quiet, harmed),
        "quiet_s": quiet.wall_s,
    }
    figures |= {"tasks_compared": len(quiet.rewards.keys() & harmed.rewards.keys())}
    print(json.dumps(figures))
    return int(bool(harmed.sampled_twice or harmed.trained_twice or harmed.faults))


if __name__ == "__main__":
    sys.exit(main())
