"""The record of an episode while it runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from slipstream.core.models.images import PlacedImage
from slipstream.core.staleness import max_text_bytes
from slipstream.core.types import (
    DROPPED_METRICS,
    MAX_METRICS,
    SAMPLED_ARRAYS,
    Branch,
    ImagePlace,
    LogprobArray,
    ReferenceLogprobs,
    kept_metrics,
    short_name,
)
from slipstream.rollout_server.agents.conversations import Conversations, TokenRecord
from slipstream.rollout_server.engine_interface import Sampling
from slipstream.v1 import environment_pb2


class ScoredSequence(NamedTuple):
    """The tokens of one sequence, and a flag for each: true if it was sampled."""

    token_ids: Sequence[int]
    is_sampled: npt.NDArray[np.bool_]


@dataclass
class Recording(TokenRecord):
    """Tokens, log-probabilities and the environment's answers, appended turn by turn."""

    # Whether the environment gave the replies.
    is_given: bool = False
    # The environment's own limit of each reply in tokens; 0 means the run's limit.
    max_reply_tokens: int = 0
    expected_answer: str = ""
    # Packed as in a trajectory; b"" unless the lease asks for them.
    prompt_logprobs: bytes = b""
    # Whether the environment compares the members of the group once all have ended, and then the
    # replies that it compares.
    judges_group: bool = False
    replies: Sequence[environment_pb2.StepCommand] = ()
    # As in a trajectory.
    judged_lease: int = 0
    # Text of the last reply; None until it is decoded.
    last_text: str | None = None
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    # Our own metrics, in addition to the environment's.
    counts: Counter[str] = field(default_factory=Counter)
    generation_s: float = 0.0
    environment_s: float = 0.0
    # Conversations that have ended, in the order of their runs; () during the first conversation.
    ended_branches: tuple[Branch, ...] = ()
    # The index of each image that the model saw, and the places of the images.
    images: dict[bytes, int] = field(default_factory=dict)
    image_places: list[ImagePlace] = field(default_factory=list)
    # The number of tokens before the current conversation.
    start: int = 0
    # The tokens that the reference model reads in place of the first context; [] if the same.
    teacher_prompt: list[int] = field(default_factory=list)
    # The log-probabilities of the sampled tokens under the reference model.
    reference: ReferenceLogprobs | None = None

    @property
    def num_sampled(self) -> int:
        return sum(self.run_lengths[1::2])

    @property
    def conversation(self) -> list[int]:
        return self.token_ids[self.start :] if self.start else self.token_ids

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All conversations in the order of their tokens, or () if none has ended yet."""
        runs = len(self.run_lengths) - sum(branch.num_runs for branch in self.ended_branches)
        last = (Branch(runs),) if self.ended_branches and runs else ()
        return self.ended_branches + last

    @property
    def sampled_arrays(self) -> dict[str, LogprobArray]:
        """The arrays with one value for each sampled token, by the names in `SAMPLED_ARRAYS`.

        An optional field is left out if any reply lacks it, and rewards if the last token earned
        all.
        """
        empty = np.zeros(0, dtype=np.float32)
        arrays = {
            name: np.concatenate([empty, *(reply[name] for reply in self.sampled)])
            for name, is_required in SAMPLED_ARRAYS.items()
            if is_required or (self.sampled and all(name in reply for reply in self.sampled))
        }
        if not arrays.get("token_rewards", empty)[:-1].any():
            arrays.pop("token_rewards", None)
        return arrays

    @property
    def short_metrics(self) -> dict[str, float]:
        """The metrics, truncated to the number and the length of names that a trajectory allows."""
        metrics = kept_metrics(self.metrics)
        if left_out := len(self.metrics) - len(metrics):
            self.counts[DROPPED_METRICS] = left_out
        counts = {short_name(name): float(count) for name, count in self.counts.items()}
        return metrics | dict([*counts.items()][:MAX_METRICS])

    def clip(self, text: str) -> str:
        """Returns `text`, truncated to the bytes that a trajectory with so many tokens may have."""
        data = text.encode()
        limit = max_text_bytes(len(self.token_ids))
        return text if len(data) <= limit else data[:limit].decode(errors="ignore")

    def take_branches(
        self,
        conversations: Conversations,
        shares: Mapping[str, float],
        rewards: Mapping[str, float],
    ) -> None:
        """Takes the tokens of all conversations of an agent, one branch after the other.

        `shares` has the factor on the advantage by branch name, 1 if missing. `rewards` has the
        reward by branch name; a branch that is missing has the reward of the episode.
        """
        first_experts = next(
            (part for branch in conversations.branches for part in branch.expert_ids), None
        )
        for branch in conversations.branches:
            self._place(branch.images)
            self.token_ids += branch.token_ids
            self.run_lengths += branch.run_lengths
            self.sampled += branch.sampled
            self.spans += branch.spans
            self.kept_tokens += branch.kept_tokens
            self.expert_ids += branch.expert_ids
            if first_experts is not None:
                self._fill_experts(first_experts)
        self.ended_branches = tuple(
            Branch(
                len(b.run_lengths),
                shares.get(b.name, 1.0),
                b.name,
                rewards.get(b.name),
            )
            for b in conversations.branches
        )

    def room(self, sampling: Sampling, *, is_new: bool = False) -> int:
        """Returns how many tokens may be added to the current conversation, below 1 if none.

        With `is_new`, the number is for a new conversation.
        """
        if is_new and max(len(self.branches), 1) >= sampling.max_branches:
            return 0
        conversation_tokens = 0 if is_new else len(self.token_ids) - self.start
        remaining = sampling.total_tokens - len(self.token_ids)
        return min(sampling.max_episode_tokens - conversation_tokens, remaining)

    def begin_branch(self) -> None:
        """Ends the current conversation; the next context begins a new one."""
        self.ended_branches = self.branches or (Branch(len(self.run_lengths)),)
        if self.expert_ids:
            self._fill_experts(self.expert_ids[0])
        self.start = len(self.token_ids)

    def sequences(self) -> list[ScoredSequence]:
        """Returns the tokens of each branch, or of the only conversation; call `close` first."""
        sequences = []
        run = 0
        token = 0
        for branch in self.branches or (Branch(len(self.run_lengths)),):
            lengths = self.run_lengths[run : run + branch.num_runs]
            is_sampled = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
            end = token + len(is_sampled)
            sequences.append(ScoredSequence(self.token_ids[token:end], is_sampled))
            run = run + branch.num_runs
            token = end
        return sequences

    def reference_sequences(self) -> list[ScoredSequence]:
        """Returns the `sequences` as the reference model reads them."""
        sequences = self.sequences()
        if not self.teacher_prompt:
            return sequences
        (sequence,) = sequences
        prompt_length = self.run_lengths[0]
        is_sampled = np.zeros(len(self.teacher_prompt), dtype=np.bool_)
        return [
            ScoredSequence(
                self.teacher_prompt + list(sequence.token_ids[prompt_length:]),
                np.concatenate([is_sampled, sequence.is_sampled[prompt_length:]]),
            )
        ]

    def close(self) -> None:
        """Ends the record: a branch whose last context has no reply gets an empty reply."""
        if self.ended_branches and len(self.run_lengths) % 2:
            self.run_lengths.append(0)

    @property
    def conversation_images(self) -> list[PlacedImage]:
        """The images of the current conversation; offsets count from the conversation's start."""
        images = list(self.images)
        return [
            PlacedImage(place.offset - self.start, images[place.image])
            for place in self.image_places
            if place.offset >= self.start
        ]

    def add_context(self, token_ids: list[int], images: Sequence[PlacedImage] = ()) -> None:
        """Appends tokens for the model to read; offsets of `images` count from the first token."""
        self._place(images)
        self.add_tokens(token_ids)

    def _place(self, images: Sequence[PlacedImage]) -> None:
        """Records where images are in the tokens that are appended next.

        The offsets of `images` count from the start of these tokens.
        """
        for image in images:
            index = self.images.setdefault(image.data, len(self.images))
            self.image_places.append(ImagePlace(len(self.token_ids) + image.offset, index))

    def _fill_experts(self, example: npt.NDArray[np.unsignedinteger]) -> None:
        """Adds placeholders, the greatest value, for tokens without experts, in `example`'s shape.

        Tokens without a forward pass, such as the last of a reply, have none.
        """
        missing = len(self.token_ids) - self.num_routed
        nothing = np.iinfo(example.dtype).max
        self.expert_ids.append(np.full((missing, *example.shape[1:]), nothing, example.dtype))
