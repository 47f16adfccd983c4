"""Checks the contents of a batch, and computes anew what other files say of its step.

A batch is read once, and one trajectory is in memory at a time.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from slipstream.client.batch_reader import Content
from slipstream.client.findings import Findings
from slipstream.core.group_sizes import GroupSizes
from slipstream.v1 import trainer_pb2, trajectory_pb2

# Fields of a trajectory's checksum, in its order.
_SAMPLED = ("behavior_logprobs", "token_rewards")
_REFERENCE = ("logprobs", "top_ids", "top_logprobs")
# A metric with this beginning counts as 0 where an episode lacks it.
_IGNORED = "ignored/"
Task = tuple[Any, ...]


@dataclass
class GroupNumbers:
    """What groups.jsonl says of a group, in the order of its members."""

    environment: str
    task_index: int
    rewards: list[float] = field(default_factory=list)
    sampled_tokens: list[int] = field(default_factory=list)
    # The mean of -log p of each member's tokens; None for a member without one.
    surprisal: list[float | None] = field(default_factory=list)
    has_branches: bool = False


@dataclass
class StepNumbers:
    """What follows from the batch of a step without a model."""

    groups: dict[str, GroupNumbers] = field(default_factory=dict)
    # Rewards by trajectory, and the sampled rows' facts of those that were asked for.
    rewards: dict[str, float] = field(default_factory=dict)
    episodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)
    num_passes: int = 0
    is_ordered: bool = False
    num_with_several_versions: int = 0
    # Numbers of trajectories, one for each, by name; `replies` has one for each reply.
    columns: dict[str, list[float]] = field(default_factory=dict)
    replies: list[int] = field(default_factory=list)
    # Values of the metrics of environments, by environment and metric.
    metrics: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    num_episodes: Counter[str] = field(
        default_factory=Counter,
    )

    @property
    def rewards_by_environment(self) -> dict[str, list[float]]:
        rewards: dict[str, list[float]] = {}
        for group in self.groups.values():
            rewards.setdefault(group.environment, []).extend(group.rewards)
        return rewards

    def row(self, group_sizes: GroupSizes) -> dict[str, float]:
        """Returns the columns of metrics.jsonl that follow from the batch."""
        rewards = self.columns["reward"]
        mean = _mean(rewards)
        lags = self.lags
        num_sampled = lags.total()
        late_tokens = sum(lag * count for lag, count in lags.items())
        prompts = self.columns["prompt_tokens"]
        episodes = self.columns["episode_tokens"]
        num_leased = sum(group_sizes.of(group.environment) for group in self.groups.values())
        lacking = max(
            num_leased - len(rewards),
            0,
        )
        row = {
            "reward_mean": mean,
            "reward_std": _deviation(rewards),
            "reward_min": min(rewards),
            "reward_max": max(rewards),
            "lag_mean": late_tokens / max(1, num_sampled),
            "lag_max": float(max(lags, default=0)),
            "trajectories_with_several_versions": float(self.num_with_several_versions),
            "num_tokens": sum(episodes),
            "prompt_tokens_mean": _mean(prompts),
            "reply_tokens_mean": num_sampled / max(1, len(self.replies)),
            "reply_tokens_max": float(max(self.replies, default=0)),
            "episode_tokens_mean": _mean(episodes),
            "episode_tokens_max": max(episodes),
            "missing_members": float(lacking),
        }
        for name in ("turns", "branches", "generation_s", "environment_s"):
            row[f"{name}_mean"] = _mean(self.columns[name])
        row["truncated_fraction"] = _mean(self.columns["truncated"])
        for (environment, metric), values in self.metrics.items():
            is_ignored = metric.startswith(_IGNORED)
            number = self.num_episodes[environment] if is_ignored else len(values)
            row[f"{environment}/{metric}"] = math.fsum(values) / number
        has_branches = any(group.has_branches for group in self.groups.values())
        if not has_branches:
            row |= self._equal_rewards()
        return row

    def _equal_rewards(self) -> dict[str, float]:
        """Returns the fractions of groups with equal rewards, of all and of each environment."""
        flags: dict[str, list[bool]] = {}
        for group in self.groups.values():
            is_equal = len(set(group.rewards)) == 1
            flags.setdefault("", []).append(is_equal)
            flags.setdefault(f"{group.environment}/", []).append(is_equal)
        return {
            f"{prefix}equal_rewards_fraction": _mean(own_flags)
            for prefix, own_flags in flags.items()
        }


def check_batch(
    contents: Iterator[Content],
    wanted: Set[str],
    check: "TrajectoryCheck",
) -> tuple[trainer_pb2.BatchHeader, StepNumbers]:
    """Returns the header and the numbers of a batch; each trajectory passes `check`.

    `wanted` are the trajectories whose facts `StepNumbers.episodes` must have. Raises OSError and
    ValueError as `read_contents` does.
    """
    # Before all else, for the file may be missing.
    header = next(contents)
    assert isinstance(header, trainer_pb2.BatchHeader)
    numbers = StepNumbers(is_ordered=header.HasField("given"))
    passes: set[str] = set()
    for message in contents:
        if isinstance(message, trainer_pb2.Pass):
            passes.add(message.id)
        elif isinstance(message, trajectory_pb2.Trajectory):
            name = name_of(message)
            check.take(name, message, numbers.lags)
            _note(name, message, numbers, header.step, with_facts=name in wanted)
    numbers.num_passes = len(passes)
    return header, numbers


class TrajectoryCheck:
    """Checks each trajectory of a batch by the journal: its task, its versions, its arrays."""

    def __init__(
        self,
        step: int,
        findings: Findings,
        *,
        run_id: str,
        tasks: Mapping[str, Task],
        ended: Mapping[str, str],
        versions: Mapping[tuple[int, int], object],
        max_staleness: int,
    ) -> None:
        """Takes the `tasks` that the batch's groups were leased for, and which names `ended`."""
        self._step = step
        self._findings = findings
        self._run_id = run_id
        self._tasks = tasks
        self._ended = ended
        self._versions = versions
        self._max_staleness = max_staleness
        self._members: set[tuple[str, int]] = set()
        # By group: the lease whose members the environment compared, None for none.
        self._judged: dict[str, tuple[int, int] | None] = {}

    def take(self, name: str, message: trajectory_pb2.Trajectory, lags: Counter[int]) -> None:
        """Checks a trajectory, and adds its tokens to `lags`."""
        findings = self._findings
        what = f"{name} of step {self._step}"
        findings.wrong(f"{what} ended as {self._ended.get(name)}", unless=name not in self._ended)
        member = (message.group_id, message.member)
        is_leased = message.group_id in self._tasks
        is_new = is_leased and member not in self._members
        findings.wrong(f"{what} was trained before", unless=is_new)
        self._members.add(member)
        task = (message.environment, message.task_index, message.seed)
        findings.same(
            f"task and lease of {what}",
            task,
            self._tasks.get(message.group_id),
        )
        judged = (message.server_epoch, message.judged_lease) if message.judged_lease else None
        findings.same(
            f"the lease whose members were compared, of {what}",
            judged,
            self._judged.setdefault(message.group_id, judged),
        )
        findings.same(f"the run of {what}", message.run_id, self._run_id)
        if _checksum(message) != message.checksum:
            findings.add(f"{what}: the checksum of its arrays is wrong")
        num_sampled = sum(message.run_lengths[1::2])
        spanned = sum(span.length for span in message.version_spans)
        findings.same(f"tokens and versions of {what}", num_sampled, spanned)
        num_tokens = len(message.token_ids) / 4
        findings.same(f"tokens and runs of {what}", num_tokens, sum(message.run_lengths))
        num_logprobs = len(message.behavior_logprobs) / 4
        findings.same(f"log-probabilities of {what}", num_logprobs, num_sampled)
        for span in message.version_spans:
            version = (span.version.incarnation, span.version.step)
            lag = self._step - span.version.step
            findings.wrong(f"{what} has lag {lag}", unless=0 <= lag <= self._max_staleness)
            is_made = version == (0, 0) or version in self._versions
            findings.wrong(f"{what}: no step made version {version}", unless=is_made)
            lags[lag] += span.length


def name_of(message: trajectory_pb2.Trajectory) -> str:
    """Returns a trajectory's name in the journal."""
    place = f"{message.group_id}.{message.member}.{message.attempt}"
    return f"{place}.{message.server_epoch:x}"


def _checksum(message: trajectory_pb2.Trajectory) -> int:
    crc32 = zlib.crc32(message.token_ids)
    for name in _SAMPLED:
        crc32 = zlib.crc32(getattr(message, name), crc32)
    crc32 = zlib.crc32(message.routed_experts.expert_ids, crc32)
    for name in _REFERENCE:
        crc32 = zlib.crc32(getattr(message.reference, name), crc32)
    for image in message.images:
        crc32 = zlib.crc32(image, crc32)
    crc32 = zlib.crc32(message.kept_tokens, crc32)
    return zlib.crc32(message.teacher_prompt, crc32)


def _note(
    name: str,
    message: trajectory_pb2.Trajectory,
    numbers: StepNumbers,
    step: int,
    *,
    with_facts: bool,
) -> None:
    spans = message.version_spans
    runs = message.run_lengths
    num_sampled = sum(runs[1::2])
    versions = {
        (
            span.version.incarnation,
            span.version.step,
        )
        for span in spans
    }
    numbers.num_with_several_versions += len(versions) > 1
    is_truncated = message.status == trajectory_pb2.EPISODE_STATUS_TRUNCATED
    for column, value in {
        "reward": message.reward,
        "prompt_tokens": runs[0] if runs else 0,
        "episode_tokens": len(message.token_ids) / 4,
        "turns": message.num_turns,
        "branches": max(1, len(message.branches)),
        "generation_s": message.generation_s,
        "environment_s": message.environment_s,
        "truncated": is_truncated,
    }.items():
        numbers.columns.setdefault(column, []).append(value)
    numbers.replies.extend(runs[1::2])
    environment = message.environment
    numbers.num_episodes[environment] += 1
    for metric, value in {
        **message.metrics,
        "reward": message.reward,
    }.items():
        numbers.metrics.setdefault((environment, metric), []).append(value)
    numbers.rewards[name] = message.reward
    group = numbers.groups.setdefault(
        message.group_id, GroupNumbers(environment, message.task_index)
    )
    group.has_branches |= bool(message.branches)
    group.rewards.append(message.reward)
    group.sampled_tokens.append(num_sampled)
    surprisal = None
    if spans:
        content = message.behavior_logprobs
        logprobs = np.frombuffer(content, dtype="<f4")
        mean = logprobs.astype(np.float64).mean()
        surprisal = -float(mean)
    group.surprisal.append(surprisal)
    if with_facts:
        lags = [span.length * (step - span.version.step) for span in spans]
        late = sum(lags)
        numbers.episodes[name] = {
            "environment": environment,
            "task_index": message.task_index,
            "prompt": message.prompt_text,
            "reply": message.reply_text,
            "answer": message.expected_answer or None,
            "reward": message.reward,
            "lag": late / num_sampled if spans else None,
            "status": trajectory_pb2.EpisodeStatus.Name(message.status)
            .removeprefix("EPISODE_STATUS_")
            .lower(),
            "sampled_tokens": num_sampled,
            "versions": [
                [
                    span.length,
                    _version_name(span.version),
                ]
                for span in spans
            ],
            "metrics": dict(message.metrics),
        }


def _version_name(version: trajectory_pb2.PolicyVersion) -> str:
    name = str(version.step)
    return f"{name}/{version.incarnation}" if version.incarnation else name


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    squares = [(value - mean) ** 2 for value in values]
    return math.sqrt(_mean(squares))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
