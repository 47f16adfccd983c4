"""Log-probabilities and entropies from hidden states, with one chunk of logits at a time.

The logits of a micro batch are by far its largest tensor. So they are computed, reduced and freed
in chunks, and the backward pass computes each chunk again. If all logits fit into `kept_logits`,
they are computed once. The vocabulary may be split over tensor parallel ranks, and be padded at its
end so that it splits evenly.

`VocabularyShard` computes with the operations of `plain_logits` what `fused_logits` computes on a
GPU by one kernel each. These operations are the reference, and serve CPUs and several targets per
row.
"""

import dataclasses
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.model.plain_logits import (
    PADDING_LOGIT,
    SetLogits,
    Sums,
    as_rows,
    plain_gradient,
    plain_reduce,
)
from torch import Tensor

# Logits in one chunk. A CPU's chunk takes 128 MiB in float32, and three such tensors are alive at a
# time; a tiny model's micro batch is one chunk. A GPU holds one chunk in the model's precision, and
# its matrix units need thousands of tokens.
CHUNK_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 29}
_FUSED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class HeadKernels(Protocol):
    """Computes logits and log-probabilities, such as bit for bit as an inference engine does."""

    def logits(
        self,
        hidden: Tensor,
        weight: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns the logits [rows, width] of hidden states, in `dtype`."""

    def token_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-probabilities of `targets` under the rows of `logits`."""


@dataclass(frozen=True)
class Projection:
    """The settings for computing log-probabilities from hidden states."""

    # Divisor of the logits.
    temperature: float
    # Entries of the vocabulary that are tokens; the rest of the weight's rows is padding.
    vocab_size: int
    # Ranks over which the vocabulary is split; None or a group of one rank if it is not.
    group: dist.ProcessGroup | None = None
    # Whether the entropies carry a gradient.
    entropy_gradient: bool = False
    # Logits in one chunk, at least those of one token; None takes the value of `CHUNK_LOGITS`.
    chunk_logits: int | None = None
    # A micro batch with at most this many logits keeps them for the backward pass; a micro batch
    # of a single chunk always does.
    kept_logits: int = 0
    # Kernels in place of torch's, for a vocabulary on one rank.
    kernels: HeadKernels | None = None

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        return self.group if self.group is not None and self.group.size() > 1 else None


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: Tensor,
    projection: Projection,
    *,
    kept_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the targets' log-probabilities and the entropies in nats; collective over the group.

    `targets` and the log-probabilities are [tokens] or [tokens, targets], the entropies [tokens];
    both results are at least float32. `hidden` [tokens, hidden size] must be the same on all ranks
    of the group; its gradient is this rank's share, which the caller must sum over the group.
    `weight` [padded vocabulary / size of group, hidden size] is this rank's shard. Results are
    computed only at the indices `rows`, and are 0 elsewhere.

    Both are of a distribution over all tokens, or over those in `kept_ids`, which is [tokens, sets]
    with each token's id plus 1, and zeros behind. A row of zeros stands for all tokens.
    """
    is_trained = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    row_values, row_entropies = _Logprobs.apply(  # type: ignore[no-untyped-call]
        hidden.index_select(0, rows),
        weight,
        targets.index_select(0, rows),
        None if kept_ids is None else kept_ids.index_select(0, rows),
        projection,
        is_trained,
    )
    logprobs = row_values.new_zeros(targets.shape)
    entropies = row_entropies.new_zeros(len(targets))
    return logprobs.index_copy(0, rows, row_values), entropies.index_copy(0, rows, row_entropies)


@dataclass(frozen=True)
class Rows:
    """Rows of a micro batch whose logits are divided by one temperature."""

    # int64, on the device of the model.
    places: Tensor
    temperature: float
    # Whether a policy sampled some of the tokens, maybe from kept ones only.
    has_sampled: bool = True


def row_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    parts: Sequence[Rows],
    projection: Projection,
    *,
    kept_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `vocab_parallel_logprobs` for all rows of `parts`, each at its temperature.

    `parts` has at least one, and no row twice.
    """
    # All calls keep their logits, or none does.
    num_logits = sum(len(rows.places) for rows in parts) * len(weight)
    if len(parts) > 1 and num_logits > projection.kept_logits:
        projection = dataclasses.replace(projection, kept_logits=0)
    outputs = [
        vocab_parallel_logprobs(
            hidden,
            weight,
            targets,
            rows.places,
            dataclasses.replace(projection, temperature=rows.temperature),
            kept_ids=kept_ids if rows.has_sampled else None,
        )
        for rows in parts
    ]
    logprobs, entropies = outputs[0]
    # The values of a part are 0 at the rows of all others.
    for other_logprobs, other_entropies in outputs[1:]:
        logprobs = logprobs + other_logprobs
        entropies = entropies + other_entropies
    return logprobs, entropies


class _Logprobs(torch.autograd.Function):
    """The autograd function of `vocab_parallel_logprobs`; it overwrites no input."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        kept_ids: Tensor | None,
        projection: Projection,
        is_trained: bool,
    ) -> tuple[Tensor, Tensor]:
        shard = VocabularyShard(weight, projection, is_one=targets.dim() == 1)
        places = shard.places(targets)
        num_rows = targets.shape[:1]
        sums = Sums(
            peaks=hidden.new_empty(num_rows, dtype=shard.dtype),
            totals=hidden.new_empty(num_rows, dtype=shard.dtype),
            expected=hidden.new_empty(num_rows, dtype=shard.dtype),
            target_logits=hidden.new_empty(targets.shape, dtype=shard.dtype),
        )
        kernels = projection.kernels
        assert kernels is None or kept_ids is None, "kernels know no kept tokens"
        kernel_logprobs = None if kernels is None else torch.empty_like(sums.target_logits)

        # A function, so that a chunk is freed before the next one is made.
        def reduce(chunk: slice) -> Tensor:
            logits = shard.logits(hidden[chunk])
            if kernels is not None and kernel_logprobs is not None:
                token_logits = logits[:, : shard.num_tokens]
                logprobs = kernels.token_logprobs(token_logits, as_rows(targets[chunk]))
                kernel_logprobs[chunk] = logprobs.view_as(targets[chunk])
            chunk_sums = Sums(*(values[chunk] for values in sums))
            shard.reduce(logits, places[chunk], chunk_sums)
            if kept_ids is not None and kept_ids.shape[1]:
                set_logits = shard.set_logits(logits, kept_ids[chunk], places[chunk])
                set_logits.reduce(chunk_sums)
            return logits

        chunks = shard.chunks(len(targets), is_trained=is_trained)
        ctx.kept_logits = reduce(chunks[0]) if is_trained and len(chunks) == 1 else None
        if ctx.kept_logits is None:
            for chunk in chunks:
                reduce(chunk)
        peaks, log_sums, means = _over_all_shards(sums, projection.tp_group)
        entropy = log_sums - means
        log_total = peaks + log_sums
        ctx.save_for_backward(hidden, weight, places, kept_ids, log_total, entropy)
        ctx.projection = projection
        if not projection.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        if kernel_logprobs is not None:
            return kernel_logprobs, entropy
        if targets.dim() > 1:
            peaks = peaks[:, None]
            log_sums = log_sums[:, None]
        # The peak is taken off first: `log_total` has the rounding of a number as large as a logit,
        # 5e-7 from 8 to 16, where a likely token's log-probability has one of 1e-8.
        return (sums.target_logits - peaks) - log_sums, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        logprob_grad: Tensor,
        entropy_grad: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, places, kept_ids, log_total, entropy = ctx.saved_tensors
        projection: Projection = ctx.projection
        shard = VocabularyShard(weight, projection, is_one=places.dim() == 1)
        slopes = logprob_grad / projection.temperature
        factors = entropy_grad / projection.temperature if projection.entropy_gradient else None
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = gradient_sum(weight) if ctx.needs_input_grad[1] else None
        # Kept logits are overwritten by their gradient; a second backward pass projects again.
        kept_logits = ctx.kept_logits
        ctx.kept_logits = None

        def logits_grad(chunk: slice) -> Tensor:
            logits = kept_logits
            if logits is None:
                logits = shard.logits(hidden[chunk])
            bends = None if factors is None else (factors[chunk], entropy[chunk])
            chunk_slopes = slopes[chunk]
            chunk_totals = log_total[chunk]
            if kept_ids is None or not kept_ids.shape[1]:
                return shard.gradient(logits, places[chunk], chunk_totals, chunk_slopes, bends)
            set_logits = shard.set_logits(logits, kept_ids[chunk], places[chunk])
            # With these the gradient of a row that has a set is 0.
            other_totals = set_logits.without_rows(chunk_totals, -PADDING_LOGIT)
            other_slopes = set_logits.without_rows(chunk_slopes, 0.0)
            other_bends = None
            if bends is not None:
                row_factors, row_entropies = bends
                other_factors = set_logits.without_rows(row_factors, 0.0)
                other_bends = other_factors, row_entropies
            grad = shard.gradient(
                logits,
                places[chunk],
                other_totals,
                other_slopes,
                other_bends,
            )
            set_logits.write_gradient(grad, chunk_totals, chunk_slopes, bends)
            return grad

        chunks = [slice(0, len(hidden))]
        if kept_logits is None:
            chunks = shard.chunks(len(hidden))
        for chunk in chunks:
            grad = logits_grad(chunk)
            if hidden_grad is not None:
                torch.mm(grad, weight, out=hidden_grad[chunk])
            if weight_grad is not None:
                _add_product(weight_grad, grad.t(), hidden[chunk])
            del grad
        returned_grad = None if weight_grad is None else as_gradient(weight, weight_grad)
        return hidden_grad, returned_grad, None, None, None, None


def _over_all_shards(sums: Sums, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the largest logit, and two numbers relative to it, each [rows].

    These are log(sum of exp(logit)) and the mean logit over the vocabulary. `sums` are those of
    this rank's shard; its target logits become those of all shards. Collective over the group.
    """
    peaks, totals, expected, target_logits = sums
    if group is None:
        return peaks, totals.log(), expected / totals
    # The sums of a rank are relative to its own peaks.
    top_peaks = peaks.clone()
    dist.all_reduce(top_peaks, op=dist.ReduceOp.MAX, group=group)
    shift = peaks - top_peaks
    scale = shift.exp()
    by_target = target_logits[None] if target_logits.dim() == 1 else target_logits.t()
    scaled_expected = (expected + shift * totals) * scale
    all_sums = torch.stack([totals * scale, scaled_expected, *by_target])
    dist.all_reduce(all_sums, group=group)
    all_totals = all_sums[0]
    target_logits.copy_(all_sums[2] if target_logits.dim() == 1 else all_sums[2:].t())
    return top_peaks, all_totals.log(), all_sums[1] / all_totals


def gradient_sum(weight: Tensor) -> Tensor:
    """Returns what gradients of `weight` are added to: its share of Megatron's buffer, or zeros."""
    if hasattr(weight, "main_grad"):
        buffer: Tensor = weight.main_grad
        return buffer
    return torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))


def as_gradient(weight: Tensor, total: Tensor) -> Tensor:
    """Returns what autograd gets for `weight`, whose gradient was added to its `gradient_sum`."""
    if not hasattr(weight, "main_grad"):
        return total.to(weight.dtype)
    # Megatron does not read the gradient of a weight with this mark, but waits for one.
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of two matrices to `total`, which may be wider than they are."""
    if total.is_cuda and total.dtype != left.dtype:
        torch.addmm(
            total,
            left,
            right,
            out_dtype=total.dtype,
            out=total,
        )
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class VocabularyShard:
    """This rank's part of the vocabulary, and the computations on its logits."""

    def __init__(
        self,
        weight: Tensor,
        projection: Projection,
        *,
        is_one: bool,
    ) -> None:
        """Takes this rank's `weight`; `is_one`: whether each row has exactly one target."""
        self._weight = weight
        self._projection = projection
        group = projection.tp_group
        self._width = len(weight)
        # Token id of the first row, and the number of rows that are not padding.
        self.first = self._width * (group.rank() if group is not None else 0)
        self.num_tokens = max(0, min(self._width, projection.vocab_size - self.first))
        # The logits' element type: bfloat16 rounds a logit of 20 by up to 0.06.
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        # The fused kernels do not support several targets per row.
        self._is_fused = is_one and weight.is_cuda and weight.dtype in _FUSED_TYPES

    def chunks(self, length: int, *, is_trained: bool = False) -> list[slice]:
        """Splits the positions 0..length into chunks; a length of 0 gives one empty chunk.

        If `is_trained` and all logits may be kept, the result is one chunk.
        """
        limit = self._projection.chunk_logits or CHUNK_LOGITS[self._weight.device.type]
        step = max(1, limit // self._width)
        if is_trained and length * self._width <= self._projection.kept_logits:
            step = max(1, length)
        starts = range(0, max(1, length), step)
        return [slice(start, min(start + step, length)) for start in starts]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [len(hidden), width], raw for fused kernels, else divided and masked."""
        kernels = self._projection.kernels
        if kernels is not None:
            logits = kernels.logits(hidden, self._weight, self.dtype)
        elif self.dtype == self._weight.dtype:
            logits = F.linear(hidden, self._weight)
        elif self._weight.is_cuda:
            # The GPU sums products in float32 anyway: this only avoids the final rounding.
            logits = torch.mm(hidden, self._weight.t(), out_dtype=self.dtype)
        else:
            logits = F.linear(hidden.to(self.dtype), self._weight.to(self.dtype))
        if not self._is_fused:
            if self._projection.temperature != 1.0:
                logits /= self._projection.temperature
            logits[:, self.num_tokens :] = PADDING_LOGIT
        return logits

    def set_logits(self, logits: Tensor, kept_ids: Tensor, places: Tensor) -> SetLogits:
        """Returns the part of `logits` [rows, width] at the tokens in `kept_ids`.

        `logits` are the result of the method `logits`, `kept_ids` is as in
        `vocab_parallel_logprobs`, and `places` are the columns of the targets, as in `reduce`.
        """
        token_ids = kept_ids.long() - 1
        columns = self.places(token_ids)
        present_columns = columns.clamp(min=0)
        values = logits.gather(1, present_columns).to(self.dtype)
        if self._is_fused:
            values /= self._projection.temperature
        # A target is one of the tokens of its row's set.
        target_columns = as_rows(places)
        is_target = columns[:, :, None] == target_columns[:, None, :]
        target_places = is_target.to(torch.int8).argmax(dim=1)
        target_places.masked_fill_(target_columns < 0, -1)
        return SetLogits(
            values=values.masked_fill_(columns < 0, PADDING_LOGIT),
            columns=columns,
            places=target_places.view_as(places),
            has_set=kept_ids[:, 0] > 0,
        )

    def reduce(
        self,
        logits: Tensor,
        places: Tensor,
        sums: Sums,
    ) -> None:
        """Fills `sums` for `logits` [rows, width], the result of the method `logits`.

        `places` [rows] or [rows, targets] are the columns of the targets, -1 where they are on
        another rank.
        """
        if self._is_fused:
            from slipstream.learner.trainer.model import fused_logits

            fused_logits.reduce(
                logits,
                places,
                self.num_tokens,
                self._projection.temperature,
                sums,
            )
        else:
            plain_reduce(logits, places, sums)

    def gradient(
        self,
        logits: Tensor,
        places: Tensor,
        log_totals: Tensor,
        slopes: Tensor,
        bends: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Returns the gradient [rows, width] of a loss by raw logits, in the weight's type.

        The loss is the sum of slope * log-probability over all targets and, with `bends`, of factor
        * entropy over all rows. The result of the method `logits` is overwritten. But the gradient
        is with respect to the logits before the division by the temperature: slopes and factors
        must already be divided by it. `slopes` and `places` are [rows] or [rows, targets]; the
        place of a target on another rank is -1. `bends` are the factors and the entropies, and
        `log_totals` the logarithms of the sums of exp(logit), each [rows].
        """
        if self._is_fused:
            from slipstream.learner.trainer.model import fused_logits

            # The gradient overwrites the logits if they have the weight's type.
            grad = logits
            if self.dtype != self._weight.dtype:
                grad = torch.empty_like(logits, dtype=self._weight.dtype)
            columns = (self.num_tokens, self._projection.temperature)
            fused_logits.gradient(logits, places, columns, log_totals, slopes, bends, grad)
            return grad
        grad = plain_gradient(logits, places, log_totals, slopes, bends)
        return grad.to(self._weight.dtype)

    def places(self, targets: Tensor) -> Tensor:
        """Returns the local row index of each target, -1 for targets of other ranks."""
        is_here = (targets >= self.first) & (targets < self.first + self._width)
        return torch.where(is_here, targets - self.first, -1)


def defer_projections(chunks: list[Megatron]) -> list[Megatron]:
    """Makes `chunks` return hidden states, not logits, on all tensor parallel ranks; returns them.

    The states are [1, tokens, hidden size]; the backward pass sums their gradients over the ranks.
    The output layers are still called, because Megatron's hooks on them wait for their weights.
    """
    from megatron.core import tensor_parallel

    def bring(
        layer: Megatron,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        if layer.sequence_parallel:
            states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=layer.tp_group
            )
        else:
            states = tensor_parallel.copy_to_tensor_model_parallel_region(
                hidden, group=layer.tp_group
            )
        return states, None

    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer.forward = types.MethodType(bring, chunk.output_layer)
    return chunks


@torch.no_grad()
def top_tokens(
    hidden: Tensor,
    weight: Tensor,
    top_k: int,
    projection: Projection,
) -> Tensor:
    """Returns the ids of the top-k tokens of each row, int64 [rows, top_k], in any order.

    `hidden` [rows, hidden size] and `weight` are as in `vocab_parallel_logprobs`. The
    temperature is ignored: it does not change the order of the logits. Collective over the group;
    all ranks get the same result.
    """
    shard = VocabularyShard(weight, projection, is_one=False)
    group = projection.tp_group
    num_local = min(top_k, shard.num_tokens)
    values = hidden.new_full((len(hidden), top_k), -torch.inf, dtype=torch.float32)
    ids = torch.zeros((len(hidden), top_k), dtype=torch.int64, device=hidden.device)
    for rows in shard.chunks(len(hidden)):
        logits = F.linear(hidden[rows], weight[: shard.num_tokens]).float()
        largest = logits.topk(num_local, dim=-1)
        values[rows, :num_local] = largest.values
        ids[rows, :num_local] = largest.indices + shard.first
    if group is None:
        return ids
    shard_values = [torch.empty_like(values) for _ in range(group.size())]
    shard_ids = [torch.empty_like(ids) for _ in range(group.size())]
    dist.all_gather(shard_values, values, group=group)
    dist.all_gather(shard_ids, ids, group=group)
    best = torch.cat(shard_values, dim=1).topk(top_k, dim=1).indices
    return torch.cat(shard_ids, dim=1).gather(1, best)
