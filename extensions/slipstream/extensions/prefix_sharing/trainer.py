"""Prefixes that sequences of a micro batch share are computed once.

The members of a group begin with the same prompt, and branches of an episode with the same turns. A
*bundle* is a set of sequences that are cut into segments; a segment that several sequences share is
stored once. Position i of a sequence predicts token i + 1. So a shared segment ends one token
before the sequences differ: each keeps the last common token for its own prediction. A position
that more than one sequence trains is never shared.

Each layer computes queries, keys and values once for each token. Before attention, the keys and
values are copied to paths: a segment's path has all tokens that the segment sees, and its own
tokens come last. Attention then runs over packed sequences with more keys than queries, aligned at
the end, which every kernel for packed sequences supports. The gradient of a key is the sum over all
its copies.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import LearnerSection
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.planner import plan_micro_batches
from slipstream.learner.trainer.batches.training_sequence import (
    Bundle,
    MicroBatch,
    Paths,
    Segment,
    TrainingSequence,
    to_device,
)
from slipstream.learner.trainer.layers.routers import counts_tokens
from slipstream.learner.trainer.model.model_part import ModelPart
from slipstream.learner.trainer.model.sharing import Arguments, SavedWork
from torch import Tensor

logger = logging.getLogger(__name__)

# Bundles take at most a micro batch divided by one of these numbers.
_BUNDLE_DIVISORS = (1, 2, 4, 8)
# A micro batch costs its tokens and the largest micro batch's tokens divided by this number.
_LAUNCH_DIVISOR = 32
_MANY = 2**63


class MaskType(Enum):
    """An attention mask type that Megatron's enumeration lacks, by TransformerEngine's name."""

    padding_causal_bottom_right = 1


class PrefixSharing:
    """Hooks that let the chunks of a model compute micro batches whose sequences share prefixes."""

    def __init__(self, chunks: list[Megatron], *, min_tokens: int) -> None:
        """Registers the hooks; `min_tokens` is the length of the shortest prefix that is shared."""
        from megatron.core.transformer.attention import SelfAttention
        from slipstream.learner.trainer.layers.attention import SharedSequences

        def laid_out(
            _module: object, arguments: tuple[Any, ...], keywords: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            shared = keywords["packed_seq_params"]
            has_paths = isinstance(shared, SharedSequences)
            return by_paths(arguments, keywords, shared) if has_paths else None

        def by_positions(_module: object, _arguments: object, angles: Tensor) -> Tensor | None:
            return None if self._positions is None else angles.index_select(0, self._positions)

        self.min_tokens = min_tokens
        # Work that sharing saved in the newest step, over all replicas.
        self.saved = SavedWork()
        self._positions: Tensor | None = None
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, SelfAttention):
                    module.core_attention.register_forward_pre_hook(laid_out, with_kwargs=True)
                rotary = getattr(module, "rotary_pos_emb", None)
                if isinstance(rotary, torch.nn.Module):
                    rotary.register_forward_hook(by_positions)

    def begin_step(self) -> None:
        """Counts the saved work from 0."""
        self.saved = SavedWork()

    def plan(
        self,
        sequences: Sequence[TrainingSequence],
        members: Sequence[int],
        *,
        max_tokens: int,
        dp_size: int,
        multiple: int,
        attention_length: float,
    ) -> list[list[list[Bundle]]] | None:
        """Returns the bundles of each micro batch of each replica; None if nothing can be shared.

        Long bundles share most; short bundles fill micro batches and replicas evenly. So several
        limits of a bundle's length are tried, and the plan with the least work is returned. The
        work that the plan saves is added to `saved`.
        """
        tree = PrefixTree(sequences, members, min_shared=self.min_tokens)
        if not tree.share:
            return None
        lengths = [len(sequences[index]) for index in members]
        candidates = []
        for parts in _BUNDLE_DIVISORS:
            bundles = tree.bundles(max_tokens // parts)
            sizes = list(map(num_tokens, bundles))
            squares = list(map(num_squares, bundles))
            plan = plan_micro_batches(
                sizes,
                max_tokens=max_tokens,
                dp_size=dp_size,
                multiple=multiple,
                attention_length=attention_length,
                squares=squares,
            )
            launch = max_tokens // _LAUNCH_DIVISOR
            work = max(
                sum(sum(sizes[place] for place in places) + launch for places in bins)
                for bins in plan
            )
            planned = [[[bundles[place] for place in places] for places in bins] for bins in plan]
            # Separate sequences would have the whole `lengths`.
            saved = SavedWork(
                self.saved.tokens + sum(lengths) - sum(sizes),
                self.saved.squares + sum(length**2 for length in lengths) - sum(squares),
            )
            candidates.append((work, parts, planned, saved))
        _, _, best, self.saved = min(candidates, key=lambda candidate: candidate[:2])
        return best

    def packed(self, micro_batch: MicroBatch, paths: Paths) -> Megatron:
        """Returns Megatron's packed-sequence parameters for a micro batch with `paths`."""
        return shared_sequences(micro_batch, paths)

    def by_paths(
        self,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        shared: Megatron,
    ) -> Arguments:
        """Returns an attention's arguments with keys and values along the paths of `shared`."""
        return by_paths(arguments, keywords, shared)

    @contextmanager
    def positions_of(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Makes rotary embeddings inside the context use the positions of `micro_batch`."""
        if micro_batch.paths is not None:
            self._positions = micro_batch.position_ids
        try:
            yield
        finally:
            self._positions = None


def shared_sequences(micro_batch: MicroBatch, paths: Paths) -> Megatron:
    """Returns Megatron's packed-sequence parameters for a micro batch with `paths`."""
    from slipstream.learner.trainer.layers.attention import SharedSequences

    bounds = torch.tensor([0, len(micro_batch.token_ids)], dtype=torch.int32)
    bounds = to_device(bounds, micro_batch.cu_seqlens.device)
    positions = torch.arange(len(micro_batch.token_ids), device=bounds.device)
    return SharedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        # Megatron derives the largest position from these two.
        max_seqlen_q=paths.max_seqlen,
        max_seqlen_kv=paths.max_seqlen,
        expert_ids=micro_batch.expert_ids,
        positions=positions,
        bounds=micro_batch.cu_seqlens,
        max_queries=micro_batch.max_seqlen,
        paths=paths,
    )


def by_paths(
    arguments: tuple[Any, ...], keywords: dict[str, Any], shared: Megatron
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns an attention's arguments with keys and values copied to the paths of `shared`.

    In the result, the packed-sequence parameters have the true bounds of queries and keys.
    """
    from slipstream.learner.trainer.layers.attention import RoutedSequences

    query, key, value, *rest = arguments
    by_path = RoutedSequences(
        qkv_format="thd",
        cu_seqlens_q=shared.bounds,
        cu_seqlens_kv=shared.paths.cu_seqlens,
        max_seqlen_q=shared.max_queries,
        max_seqlen_kv=shared.paths.max_seqlen,
    )
    mask_type = MaskType.padding_causal_bottom_right
    changed = {"packed_seq_params": by_path, "attn_mask_type": mask_type}
    copied: Callable[..., Tensor] = KeysByPath.apply
    laid_out = (query, copied(key, shared.paths), copied(value, shared.paths), *rest)
    return laid_out, keywords | changed


class KeysByPath(torch.autograd.Function):
    """Copies keys or values [tokens, heads, dim] to all paths; sums gradients in float32."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, paths: Paths) -> Tensor:  # noqa: ANN401
        """Returns the keys (or values) of all paths, path after path: [copies, heads, dim]."""
        ctx.paths = paths
        return keys.index_select(0, paths.key_places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        """Returns the gradient of each token: the sum over its copies."""
        (grad,) = grads
        paths: Paths = ctx.paths
        if grad.is_cuda:
            from slipstream.extensions.prefix_sharing.path_sums import sum_copies

            return sum_copies(grad, paths.copies, paths.copy_bounds), None
        total = grad.new_zeros((len(paths.copy_bounds) - 1, *grad.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, paths.key_places, grad.float()).to(grad.dtype), None


def refusal(
    config: Megatron,
    learner: LearnerSection,
    *,
    router_replay: bool,
    on_gpu: bool,
) -> str:
    """Returns why a model of `config` cannot share prefixes in this layout, or "" if it can."""
    if on_gpu and config.params_dtype == torch.float32:
        return "TransformerEngine has no fused attention for float32"
    if learner.parallel.cp > 1:
        return "context parallel ranks hold chunks of whole sequences"
    if config.multi_latent_attention:
        return "latent attention applies its positions elsewhere"
    if config.window_size is not None:
        return "attention windows are not tested with it"
    if getattr(config, "is_delta_net", None) is not None:
        return "delta nets read each sequence from its beginning"
    if router_replay:
        return "each sequence has routed experts of its own"
    if counts_tokens(config):
        return "routers count each token as often as there are sequences with it"
    return ""


def num_tokens(bundle: Bundle) -> int:
    """Returns the number of tokens of a bundle, shared tokens counted once."""
    return sum(map(len, bundle))


def num_squares(bundle: Bundle) -> int:
    """Returns the attention work of a bundle; the work of a single sequence of l tokens is l²."""
    return sum(segment.end**2 - segment.start**2 for segment in bundle)


class PrefixTree:
    """Sequences sorted so that sequences with a common prefix are neighbours.

    `members` are the indices of the sequences to use. A prefix shorter than `min_shared` tokens is
    not shared. The same sequences always give the same bundles.
    """

    def __init__(
        self, sequences: Sequence[TrainingSequence], members: Sequence[int], *, min_shared: int
    ) -> None:
        self._sequences = sequences
        self._min_shared = min_shared
        keys = {index: sequences[index].token_ids.astype(">u4").tobytes() for index in members}
        order = sorted(members, key=lambda index: (keys[index], index))
        common = [_MANY]
        for first, other in itertools.pairwise(sequences[index].token_ids for index in order):
            length = min(len(first), len(other))
            differing = np.flatnonzero(first[:length] != other[:length])
            common.append(int(differing[0]) if len(differing) else length)
        self._runs = _Run(order, common[: len(order)]).cut(min_shared + 1)

    @property
    def share(self) -> bool:
        return any(len(run.indices) > 1 for run in self._runs)

    def bundles(self, max_tokens: int) -> list[Bundle]:
        """Returns bundles that cover all sequences.

        A bundle has at most `max_tokens` tokens, unless it has only one sequence.
        """
        bundles: list[Bundle] = []
        waiting = self._runs[::-1]
        while waiting:
            run = waiting.pop()
            bundle = list[Segment]()
            self._add(bundle, run, 0, None)
            if num_tokens(bundle) <= max_tokens or len(run.indices) == 1:
                bundles.append(bundle)
                continue
            middle = len(run.indices) // 2
            for half in (slice(middle, None), slice(None, middle)):
                waiting.append(_Run(run.indices[half], run.common[half]))
        return bundles

    def _add(
        self,
        bundle: Bundle,
        run: _Run,
        start: int,
        parent: int | None,
    ) -> None:
        """Adds segments for the positions of `run` from `start` on; all earlier tokens are equal.

        `parent` is the index of the segment that ends at `start`, or None.
        """
        if len(run.indices) == 1:
            (index,) = run.indices
            bundle.append(Segment(index, start, len(self._sequences[index]), parent))
            return
        trained = self._trained(run, start)
        end = min(min(run.common[1:]) - 1, trained[1][0])
        if end - start >= self._min_shared:
            bundle.append(Segment(trained[0][1], start, end, parent))
            start = end
            parent = len(bundle) - 1
        parts = run.cut(start + self._min_shared + 1)
        if len(parts) == 1:
            # Several sequences train the next positions: only one of them shares with the sequences
            # that train none.
            near = start + self._min_shared
            rivals = [index for first, index in self._trained(run, start)[1:] if first < near]
            parts = [run.without(rivals), *(_Run([index], [0]) for index in rivals)]
        for part in parts:
            self._add(bundle, part, start, parent)

    def _trained(self, run: _Run, start: int) -> list[tuple[int, int]]:
        """Returns (first trained position from `start` on, index) of each sequence, sorted.

        For a sequence that trains no position from `start` on, the position is its length.
        """
        places_and_indices = []
        for index in run.indices:
            mask = self._sequences[index].loss_mask
            places = np.flatnonzero(mask[start:])
            places_and_indices.append((start + int(places[0]) if len(places) else len(mask), index))
        return sorted(places_and_indices)


@dataclass(frozen=True)
class _Run:
    """Sequences sorted by their tokens, with the lengths of the prefixes that neighbours share.

    `common` has for each sequence the number of leading tokens that equal the previous sequence's;
    its first entry has no meaning.
    """

    indices: list[int]
    common: list[int]

    def cut(self, min_shared: int) -> list[_Run]:
        """Cuts the run between neighbours that share under `min_shared` tokens; returns parts."""
        if not self.indices:
            return []
        cuts = [place for place in range(1, len(self.indices)) if self.common[place] < min_shared]
        bounds = itertools.pairwise([0, *cuts, len(self.indices)])
        return [_Run(self.indices[start:end], self.common[start:end]) for start, end in bounds]

    def without(self, leaving: Collection[int]) -> _Run:
        """Returns the run without the sequences `leaving`."""
        indices = []
        common = []
        shared = _MANY
        for index, number in zip(self.indices, self.common, strict=True):
            shared = min(shared, number)
            if index not in leaving:
                indices.append(index)
                common.append(shared)
                shared = _MANY
        return _Run(indices, common)


class SharingPart(ModelPart):
    """Packs sequences of a model with common prefixes, where its attention can share them."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def sharing(
        self,
        chunks: list[Megatron],
        device: torch.device,
        *,
        sees_images: bool,
    ) -> PrefixSharing | None:
        algorithm = self._config.algorithm
        learner = self._config.learner
        if sees_images or algorithm.agreement != "close":
            return None
        cause = refusal(
            chunks[0].config,
            learner,
            router_replay=algorithm.router_replay != "off",
            on_gpu=device.type == "cuda",
        )
        if cause:
            logger.info("shared prefixes are computed for each sequence: %s", cause)
            return None
        return PrefixSharing(chunks, min_tokens=learner.shared_prefix_tokens)
