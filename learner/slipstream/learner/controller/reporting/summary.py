"""The lines of trajectories.jsonl and groups.jsonl, and the facts of summary.json."""

import asyncio
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pydantic import JsonValue
from slipstream.core.run_folder import SERVER_SHARES, TRAINER_PARTS
from slipstream.core.settings.config import Config
from slipstream.core.types import TokenArray, Trajectory
from slipstream.learner.controller.events import EventLog

TOKENIZER = "tokenizer.json"


# Returns the text of tokens, special tokens included.
TokenTexts: TypeAlias = Callable[[TokenArray], str]


async def open_token_texts(config: Config, events: EventLog) -> TokenTexts | None:
    """Opens the model's own tokenizer, without torch and transformers, to tell turns apart.

    Returns None if `sampling.max_turns` is 1, so that it is not needed, or if its file is missing.
    Adds a warning if the file is missing and `sampling.max_turns` is above 1.
    """
    if config.sampling.max_turns == 1:
        return None
    path = config.model.path / TOKENIZER
    if not path.is_file():
        if config.sampling.max_turns > 1:
            folder = config.model.path
            events.warn(
                f"trajectories.jsonl does not tell turns apart: {folder} has no {TOKENIZER}"
            )
        return None
    from tokenizers import Tokenizer

    # About a second if the vocabulary is large.
    tokenizer = await asyncio.to_thread(Tokenizer.from_file, str(path))
    return lambda token_ids: tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)


def group_line(step: int, members: Sequence[Trajectory]) -> dict[str, JsonValue]:
    """Returns the line of a group in groups.jsonl; each list has one number per member.

    `surprisal` is the mean of -log p over the sampled tokens of a member, in nats: an estimate of
    the policy's entropy. It is None for a member without a sampled token.
    """
    return {
        "step": step,
        "environment": members[0].environment,
        "task_index": members[0].task_index,
        "rewards": [member.reward for member in members],
        "sampled_tokens": [member.num_sampled_tokens for member in members],
        "surprisal": [
            -float(member.behavior_logprobs.mean()) if member.version_spans else None
            for member in members
        ],
    }


def readable(
    step: int, trajectory: Trajectory, texts: TokenTexts | None, advantage: float | None = None
) -> dict[str, JsonValue]:
    """Returns the line of an episode in trajectories.jsonl.

    docs/guides/watching.md explains the fields. An episode of more than one turn has `turns`; one
    with branches has `branches` instead, with the turns of each branch. `texts` decodes the tokens
    of turns; if it is None, the line has no turns. `advantage` is the mean over the trained tokens,
    or None if it is unknown.
    """
    spans, sampled = trajectory.version_spans, trajectory.num_sampled_tokens
    lags = sum(span.length * (step - 1 - span.version.step) for span in spans)
    line: dict[str, JsonValue] = {
        "step": step,
        "trajectory_id": trajectory.trajectory_id,
        "environment": trajectory.environment,
        "task_index": trajectory.task_index,
        "prompt": trajectory.prompt_text,
        "reply": trajectory.reply_text,
        "answer": trajectory.expected_answer or None,
        "reward": trajectory.reward,
        "advantage": advantage,
        "lag": lags / sampled if spans else None,
        "status": trajectory.status.name.lower(),
        "sampled_tokens": sampled,
        "versions": [[span.length, str(span.version)] for span in spans],
        "metrics": dict(trajectory.metrics),
    }
    tokens, runs, rewards = trajectory.token_ids, trajectory.run_lengths, trajectory.turn_rewards()
    branches: list[JsonValue] = []
    for part in trajectory.sequences if trajectory.branches else ():
        branch: dict[str, JsonValue] = {
            "name": part.branch.name,
            "share": part.branch.share,
            "reward": part.branch.reward,
            "sampled_tokens": part.sampled.stop - part.sampled.start,
        }
        if texts is not None:
            own = rewards[part.runs.start // 2 : part.runs.stop // 2]
            branch["turns"] = _turns(tokens[part.tokens], runs[part.runs], texts, own)
        branches.append(branch)
    if branches:
        line["branches"] = branches
    elif texts is not None and len(runs) > 2:
        line["turns"] = _turns(tokens, runs, texts, rewards)
    return line


def _turns(
    token_ids: TokenArray, lengths: tuple[int, ...], texts: TokenTexts, rewards: Sequence[float]
) -> list[JsonValue]:
    place = 0
    turns: list[JsonValue] = []
    runs = itertools.zip_longest(lengths[::2], lengths[1::2], fillvalue=0)
    for (context, sampled), reward in itertools.zip_longest(runs, rewards):
        middle, end = place + context, place + context + sampled
        turns.append(
            {
                "context": texts(token_ids[place:middle]),
                "context_tokens": context,
                "sampled": texts(token_ids[middle:end]),
                "sampled_tokens": sampled,
                "reward": reward,
            }
        )
        place = end
    return turns


# Seconds over which the rate is averaged: heartbeats are too rare for a single step.
WINDOW_S = 5.0
EDGE_STEPS = 5


class GenerationRate:
    """Generated tokens per second, over the last `WINDOW_S` seconds.

    The time before the first generation since the controller started is left out.
    """

    def __init__(self) -> None:
        # Tokens that earlier starts of the run generated.
        self.earlier = 0
        # (time, tokens generated by then): the points in the window, and the last point before it.
        self._points: deque[tuple[float, int]] = deque()

    def began(self, at_s: float) -> None:
        """Notes that an engine was busy from `at_s` on; only the first call counts."""
        if not self._points:
            self._points.append((at_s, self.earlier))

    def at(self, now_s: float, generated: int) -> float:
        """Returns the rate at `now_s`, with `generated` tokens in all, or 0 before any of them."""
        if not self._points:
            return 0.0
        self._points.append((now_s, generated))
        while len(self._points) > 2 and now_s - self._points[1][0] >= WINDOW_S:
            self._points.popleft()
        then_s, before = self._points[0]
        return (generated - before) / max(now_s - then_s, 1e-9)


@dataclass
class RunFacts:
    """Counts and sums of a run, restored from the rows of its metrics."""

    first_rewards: list[float] = field(default_factory=list)
    last_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=EDGE_STEPS))
    # Seconds of all steps and of each activity, and of the steps in which servers have reported.
    spent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    reported_s: float = 0.0
    gap_sum: float = 0.0
    gap_tokens: float = 0.0
    gap_max: float = 0.0
    gradient_overflows: int = 0

    def edge_rewards(self, steps: int) -> tuple[list[float], list[float]]:
        """Returns the mean rewards of the first and of the last of `steps`, up to five of each.

        No step is in both lists, except in a run of one step.
        """
        num_edge = max(1, min(EDGE_STEPS, steps // 2))
        return self.first_rewards[:num_edge], list(self.last_rewards)[-num_edge:]

    def time_shares(self) -> dict[str, JsonValue]:
        """Returns the share of time of each activity, for "trainer" and "servers".

        Leaves out the trainer or the servers if there is no data about them.
        """
        found: dict[str, JsonValue] = {}
        if step_s := self.spent_s["step_s"]:
            trainer = {TRAINER_PARTS[name]: self.spent_s[name] / step_s for name in TRAINER_PARTS}
            found["trainer"] = {**trainer, "other": max(0.0, 1.0 - sum(trainer.values()))}
        if self.reported_s:
            found["servers"] = {
                name.split("_")[1]: self.spent_s[name] / self.reported_s for name in SERVER_SHARES
            }
        return found

    def count_row(self, row: Mapping[str, float]) -> None:
        """Adds the row of one step to the counts and sums of the run."""
        step_s = row.get("step_s", 0.0)
        if SERVER_SHARES[0] in row:
            self.reported_s += step_s
        for name in ("step_s", *TRAINER_PARTS, *SERVER_SHARES):
            value = row.get(name, 0.0) * (step_s if name in SERVER_SHARES else 1.0)
            self.spent_s[name] += value if math.isfinite(value) else 0.0
        self.gradient_overflows += int(row.get("gradient_overflows", 0))
        # A step that a client has ordered has no rewards here.
        rewards = [row["reward_mean"]] if "reward_mean" in row else []
        self.last_rewards.extend(rewards)
        if len(self.first_rewards) < EDGE_STEPS:
            self.first_rewards.extend(rewards)
        tokens, mean, most = (
            row.get(f"logprob_gap_{name}", math.nan) for name in ("tokens", "mean", "max")
        )
        # A step without tokens of the newest version has none of the three.
        if not math.isnan(tokens + mean + most):
            self.gap_sum += mean * tokens
            self.gap_tokens += tokens
            self.gap_max = max(self.gap_max, most)
