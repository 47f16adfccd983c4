"""The values that travel between the parts of a run."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import ProtocolError

GroupId = NewType("GroupId", str)
TrajectoryId = NewType("TrajectoryId", str)
ServerId = NewType("ServerId", str)

_NAME = re.compile(r"([^.]+)\.([0-9]{1,9})\.([0-9]{1,9})\.([0-9a-f]{1,16})")

# Reward of an episode from which on a reply passes an evaluation and a task counts as solved: 1 but
# for rounding, since 0.7 + 0.2 + 0.1 is less.
FULL_REWARD = 1 - 1e-6
# Prefix of an agent episode's metrics: the number of calls that asked for something that was
# ignored. A missing metric counts as 0.
IGNORED = "ignored/"
# The number of an episode's metrics that are left out, beyond what a trajectory has.
DROPPED_METRICS = "dropped_metrics"
# Metric with the number of replies of an episode that stopped at no end of a reply.
WITHOUT_END = "replies_without_end"
# Metrics with the numbers of an agent's calls, and of their sampled tokens, that were answered from
# the record of an attempt that was lost; and of recorded calls that the program did not ask for
# again.
RECOVERED_CALLS = "recovered_calls"
RECOVERED_TOKENS = "recovered_tokens"
UNASKED_CALLS = "unasked_calls"
# Largest number of an environment's metrics in a trajectory, and of a run's own ones there; and the
# largest number of characters and bytes in a metric's name.
MAX_METRICS = 16
_MAX_METRIC_NAME = 40
_MAX_METRIC_BYTES = 128
# Names of what a run measures itself of environments and evaluations: others get other names.
MEASURED = re.compile(
    r"reward(_mean|_std|_min|_max|_median)?|reply_tokens_(mean|max)|truncated_fraction|pass_at_\d+|"
    r"num_(episodes|failed)|equal_rewards_fraction|dropped_metrics|((turn|branch)_rewards|ignored)/.*"
)

TokenArray = npt.NDArray[np.uint32]
LogprobArray = npt.NDArray[np.float32]

# Fields of a trajectory that are a float32 array with a value for each sampled token, and whether
# every trajectory has the field; a field that some lack is None there. The record of an episode,
# the wire form and its checks walk this table.
SAMPLED_ARRAYS = {"behavior_logprobs": True, "token_rewards": False}

# Attempts beyond `Lease.max_attempts` that a server may make, since an attempt does not count if it
# ended with a worker that other tasks shared. A task runs alone after two losses of a worker in a
# row, so chance does not exceed this number.
MAX_EXCUSED_ATTEMPTS = 4

ExpertArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
# The most experts whose ids fit one byte, where the largest value means "not recorded".
_ONE_BYTE = 255
_TWO_BYTES = 65535
# The protocol's bound of `top_k`; see trajectory.proto.
MAX_TOP_K = 128
# Rounding may raise the logarithm of 1, and a sum of probabilities, to at most these values.
_LARGEST_LOGPROB = 1e-3
_LARGEST_SUM = 1.01


def kept_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of an episode that a trajectory takes, by the names that it takes.

    One with a name of what the run measures itself stays apart: `reward` is `metric/reward`.
    """
    taken: dict[str, float] = {}
    for name, value in metrics.items():
        prefix = "metric/" if MEASURED.fullmatch(name) else ""
        taken[short_name(f"{prefix}{name}")] = value
    return dict([*taken.items()][:MAX_METRICS])


def short_name(name: str) -> str:
    """Returns what a trajectory takes of a metric's name."""
    return name[:_MAX_METRIC_NAME].encode()[:_MAX_METRIC_BYTES].decode(errors="ignore")


class TrajectoryName(NamedTuple):
    """The parts of a `TrajectoryId`."""

    group_id: GroupId
    member: int
    attempt: int
    epoch: int

    # Several parts of the controller parse the id of one delivery, one after the other.
    @staticmethod
    @functools.lru_cache(maxsize=32)
    def parse(trajectory_id: str) -> TrajectoryName | None:
        """Returns the parts of an id, or None if the text is not a trajectory's id."""
        match = _NAME.fullmatch(trajectory_id)
        if match is None:
            return None
        group_id, member, attempt, epoch = match.groups()
        return TrajectoryName(GroupId(group_id), int(member), int(attempt), int(epoch, 16))


class PolicyVersion(NamedTuple):
    """A version of the weights: the number of training steps (`step`), and an `incarnation`.

    If a step is trained again with another result, the incarnation of all later versions is one
    higher.
    """

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.step}" if self.incarnation == 0 else f"{self.step}/{self.incarnation}"


class VersionSpan(NamedTuple):
    """A span of `length` consecutive sampled tokens that all come from `version`."""

    length: int
    version: PolicyVersion


class Status(Enum):
    """The way in which an episode ended."""

    COMPLETED = 1
    TRUNCATED = 2
    FAILED = 3
    CANCELLED = 4


class FailureKind(Enum):
    """The cause of an episode without a reward."""

    ENVIRONMENT = 1
    TIMEOUT = 2
    ENGINE = 3
    INFRASTRUCTURE = 4
    # The prompt is longer than the limit: no attempt can succeed.
    PROMPT_TOO_LONG = 5
    # The worker ended because of another episode: this one runs again, without counting an attempt.
    BYSTANDER = 6


class Purpose(Enum):
    """The purpose of an episode; evaluation episodes are never trained."""

    TRAINING = 1
    EVALUATION = 2


@dataclass(frozen=True)
class Failure:
    """The reason why an episode has no reward."""

    kind: FailureKind
    message: str


@dataclass(frozen=True)
class Branch:
    """One conversation of an episode: `num_runs` runs, context and sampled tokens in turn.

    `num_runs` is even. The tokens sampled in the branch get the episode's advantage times `share`.
    `name` is the name under which the agent asked for the branch, or empty. All branches of one
    name have the same `reward`; None means the reward of the episode.
    """

    num_runs: int
    share: float = 1.0
    name: str = ""
    reward: float | None = None


class ImagePlace(NamedTuple):
    """The first token of an image in a trajectory, and the index of the image."""

    offset: int
    image: int


class TokenSequence(NamedTuple):
    """One branch, and its slices of a trajectory's tokens, runs and sampled tokens."""

    branch: Branch
    tokens: slice
    runs: slice
    sampled: slice


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The record of one attempt at one episode.

    `token_ids` holds context and sampled tokens in the order in which the model saw them;
    `run_lengths` alternates context, sampled, context, sampled, ... and adds up to their number.
    `behavior_logprobs` (natural logarithm, after temperature and truncation of the distribution)
    and `version_spans` run over the sampled tokens only. `routed_experts` runs over all tokens, and
    is None if experts were not recorded.

    The runs of `branches` follow each other: each branch is a sequence that the model saw without
    the others, and a token is sampled in one branch only. Without branches, all runs are one
    sequence.

    `images` holds each distinct image that the model saw, encoded; `image_places` holds where each
    one appears.

    `is_given` says that the environment gave all replies: their tokens count as sampled, although
    no policy sampled them. `reference` has the sampled tokens' log-probabilities by a served
    reference model.

    `token_rewards` has the parts of the reward at the sampled tokens that earned them: of a turn as
    a whole at its last token. It adds up to `reward`, or to the reward of each side. None means
    that the last sampled token earned all.

    `judged_lease` is the first attempt, plus 1, of the lease whose members the environment compared
    with each other; 0 means that the episode was judged by itself.

    No other field has a default, so that whatever makes a trajectory states all of it.
    """

    run_id: str
    group_id: GroupId
    member: int
    attempt: int
    server_id: ServerId
    server_epoch: int
    environment: str
    task_index: int
    seed: int
    purpose: Purpose
    status: Status
    failure: Failure | None
    will_retry: bool
    token_ids: TokenArray
    run_lengths: tuple[int, ...]
    behavior_logprobs: LogprobArray
    version_spans: tuple[VersionSpan, ...]
    reward: float
    token_rewards: LogprobArray | None = None
    metrics: dict[str, float]
    num_turns: int
    generation_s: float
    environment_s: float
    prompt_text: str
    reply_text: str
    routed_experts: RoutedExperts | None
    branches: tuple[Branch, ...]
    is_given: bool
    reference: ReferenceLogprobs | None
    images: tuple[bytes, ...]
    image_places: tuple[ImagePlace, ...]
    # The adapter that sampled the tokens and learns from them; "" if the run names no adapters.
    adapter: str
    # The environment's own limit of each reply; 0 means the run's limit.
    max_reply_tokens: int
    # The right answer as text, or "" if the environment told none.
    expected_answer: str
    # float32, little endian: the log-probability at temperature 1 of each token before the first
    # reply but the first token; b"" if the lease did not ask for them.
    prompt_logprobs: bytes
    # The tokens that sampled tokens were drawn from, as `KeptTokens` packs them; b"" if all were
    # drawn from all tokens.
    kept_tokens: bytes
    judged_lease: int
    # uint32, little endian: what the reference model reads in place of the first run; b"" if it
    # reads what the policy read.
    teacher_prompt: bytes

    @functools.cached_property
    def trajectory_id(self) -> TrajectoryId:
        """The id; two deliveries of one attempt on one server epoch have the same id."""
        return TrajectoryId(f"{self.group_id}.{self.member}.{self.attempt}.{self.server_epoch:x}")

    @functools.cached_property
    def num_sampled_tokens(self) -> int:
        return sum(self.run_lengths[1::2])

    @property
    def has_reward(self) -> bool:
        """Whether the environment gave a reward: only then may the episode be trained."""
        return self.status in (Status.COMPLETED, Status.TRUNCATED)

    @functools.cached_property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The token sequences of the episode: one for each branch, or one of all runs."""
        sequences = []
        run = 0
        token = 0
        sampled = 0
        for branch in self.branches or (Branch(len(self.run_lengths)),):
            lengths = self.run_lengths[run : run + branch.num_runs]
            ends = run + branch.num_runs, token + sum(lengths), sampled + sum(lengths[1::2])
            sequences.append(
                TokenSequence(
                    branch,
                    tokens=slice(token, ends[1]),
                    runs=slice(run, ends[0]),
                    sampled=slice(sampled, ends[2]),
                )
            )
            run, token, sampled = ends
        return tuple(sequences)

    def unpredicted(self) -> list[int]:
        """Returns the indices of sampled tokens that begin a sequence: nothing predicts them."""
        return [
            part.sampled.start
            for part in self.sequences
            if part.sampled.stop > part.sampled.start and not self.run_lengths[part.runs.start]
        ]

    def turn_rewards(self) -> list[float]:
        """Returns the reward of each turn, in order, or [] if several branches share one."""
        lengths = self.run_lengths[1::2]
        if self.token_rewards is not None:
            parts = np.split(self.token_rewards, np.cumsum(lengths[:-1]))
            return [float(part.sum(dtype=np.float64)) for part in parts]
        is_shared = len(self.branches) > 1 or not lengths
        return [] if is_shared else [0.0] * (len(lengths) - 1) + [self.reward]

    def sampled_mask(self) -> npt.NDArray[np.bool_]:
        """Returns one flag for each token of `token_ids`: true if the model sampled it."""
        flags = np.arange(len(self.run_lengths)) % 2 == 1
        return np.repeat(flags, self.run_lengths)


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The experts of each token, layer by layer.

    `expert_ids` is [tokens, layers, experts per token]: uint8 with up to 255 experts, else uint16.
    The order within a token and layer has no meaning. The largest value of the type means "not
    recorded".
    """

    expert_ids: ExpertArray
    num_experts: int

    @classmethod
    def of_parts(
        cls, parts: Sequence[npt.NDArray[np.unsignedinteger]], num_experts: int, *, num_tokens: int
    ) -> RoutedExperts:
        """Joins the experts of consecutive tokens, beginning with the first token of a trajectory.

        Each part is [tokens, layers, experts per token]. Tokens behind the last part, up to
        `num_tokens`, are "not recorded".
        """
        dtype = expert_dtype(num_experts)
        recorded = np.concatenate(parts).astype(dtype)
        missing = num_tokens - len(recorded)
        assert missing >= 0, f"experts of {len(recorded)} tokens for {num_tokens}"
        rest = np.full((missing, *recorded.shape[1:]), np.iinfo(dtype).max, dtype=dtype)
        return cls(np.concatenate([recorded, rest]), num_experts)

    @classmethod
    def not_here(cls, dimensions: tuple[int, ...], num_experts: int) -> RoutedExperts:
        """Returns experts [tokens, layers, top_k] that are all "not recorded", without memory."""
        dtype = expert_dtype(num_experts)
        missing = np.array(np.iinfo(dtype).max, dtype=dtype)
        return cls(np.broadcast_to(missing, dimensions), num_experts)

    @property
    def is_recorded(self) -> npt.NDArray[np.bool_]:
        """A flag for each token: true if the experts of all its layers are recorded."""
        missing = np.iinfo(self.expert_ids.dtype).max
        return (self.expert_ids != missing).all(axis=(1, 2))  # type: ignore[no-any-return]


def expert_dtype(num_experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """Returns the type of ids of experts; raises ProtocolError for more than 65535."""
    if num_experts > _TWO_BYTES:
        raise ProtocolError(f"experts must be at most {_TWO_BYTES}, got {num_experts}")
    return np.dtype(np.uint8) if num_experts <= _ONE_BYTE else np.dtype(np.uint16)


@dataclass(frozen=True, eq=False)
class ReferenceLogprobs:
    """The reference model's log-probabilities of sampled tokens, and its most likely tokens.

    `logprobs` is float32 [sampled tokens], `top_ids` uint32 and `top_logprobs` float32 [sampled
    tokens, top_k]; natural logarithms at temperature 1. A sampled first token of a sequence, which
    nothing predicts, has zeros. The most likely tokens have no order.
    """

    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.uint32]
    top_logprobs: npt.NDArray[np.float32]

    @property
    def top_k(self) -> int:
        return int(self.top_ids.shape[1])


def check_reference(reference: ReferenceLogprobs, unpredicted: Sequence[int] = ()) -> str:
    """Returns the first fault that shows `reference` to be invalid, or "" if there is none.

    `unpredicted` are indices of sampled tokens that nothing predicts; their most likely tokens are
    not compared.
    """
    for values in (reference.logprobs, reference.top_logprobs):
        if values.size and not (highest := float(values.max())) <= _LARGEST_LOGPROB:
            return f"a log-probability of the reference is {highest:g}, above 0"
        if not np.isfinite(values).all():
            return "a log-probability of the reference is not a finite number"
    if not reference.top_ids.size:
        return ""
    predicted = np.ones(len(reference.logprobs), dtype=np.bool_)
    predicted[list(unpredicted)] = False
    ordered = np.sort(reference.top_ids[predicted], axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return "the reference names a token twice among its most likely tokens"
    sums = np.exp(reference.top_logprobs[predicted].astype(np.float64)).sum(axis=1)
    if sums.size and sums.max() > _LARGEST_SUM:
        return f"probabilities of the reference add up to {sums.max():g}, above 1"
    return ""
