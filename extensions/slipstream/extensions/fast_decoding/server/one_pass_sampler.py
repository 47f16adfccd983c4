# ruff: noqa: ANN001, ANN202 - Triton compiles the kernels from the types of their arguments
"""A sampler that reads a step's logits once, for a token and its log-probability.

vLLM's reads them once for the token, twice for the log-probability, and again for a rank, which
nobody here looks at. Where settings cut what is sampled, vLLM's sampler also reads them for the
tokens that are kept, and copies a bit for each token of the vocabulary to the host; this one reads
only the parts that have kept tokens, and copies their ids. The noise is vLLM's own: the same seed
samples the same token. Triton is installed only with torch's CUDA build, so vLLM's workers import
this module by its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from slipstream.core.kept_tokens import MAX_KEPT_TOKENS
from slipstream.extensions.fast_decoding.server.arguments import SAMPLER
from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.outputs import LogprobsTensors, SamplingMaskLists
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu_worker import Worker

# Logits that one program reads.
_BLOCK = 4096


class OnePassWorker(Worker):  # type: ignore[misc]
    """vLLM's worker of a GPU, whose model is sampled by `OnePassSampler`."""

    # Why the worker does without features, by their names.
    disabled_features: Mapping[str, str] = MappingProxyType({})

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads the model, which makes vLLM's sampler."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        sampler = getattr(self.model_runner, "sampler", None)
        # vLLM's older runner and a user's arguments bring other classes.
        if type(sampler) is Sampler:
            sampler.__class__ = OnePassSampler
        else:
            name = type(sampler).__name__
            self.disabled_features = {SAMPLER: f"tokens are sampled by {name} of vLLM"}


class OnePassSampler(Sampler):  # type: ignore[misc]
    """Samples by one kernel where only the sampled tokens' log-probabilities are asked for."""

    def __call__(self, logits: Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Returns tokens and log-probabilities, with ranks of 0, or what vLLM's sampler returns."""
        batch = input_batch
        rows = input_batch.idx_mapping_np
        if (
            self.get_logprobs_dims(rows) != (0, 0)
            or len(logits) != len(rows)
            or self.logprobs_mode != "processed_logprobs"
            or self.use_fp64_gumbel
            or self.compute_nans
            or self.trace_replay_state is not None
        ):
            output = super().__call__(logits, batch)
            if (masks := output.sampling_mask_tensors) is not None:
                # A larger set would take longer to send than its token takes to compute.
                masks.counts.masked_fill_(masks.counts > MAX_KEPT_TOKENS, 0)
            return output
        positions = batch.positions[batch.logits_indices]
        logits = self.apply_sampling_params(
            logits,
            batch.expanded_idx_mapping,
            batch.idx_mapping,
            rows,
            positions,
            batch.input_ids[batch.logits_indices],
            batch.expanded_local_pos,
            batch.seq_lens_cpu_upper_bound.numpy(),
        )
        states = self.sampling_states
        tokens, logprobs, part_counts = sample(
            logits,
            batch.expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            positions,
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        tokens = tokens[:, None]
        ranks = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        tensors = LogprobsTensors(tokens, logprobs[:, None], ranks)
        kept_tokens = kept_token_tensors(logits, part_counts) if self.return_sampling_mask else None
        return SamplerOutput(tokens, tensors, None, num_sampled, num_rejected, kept_tokens)


@dataclass(frozen=True)
class KeptTokenTensors:
    """What the tokens of a step were drawn from, with the methods that vLLM's worker calls.

    `token_ids` is int32 [rows, room for ids], ascending in each row. `counts` is int32 [rows]; 0
    stands for more than `MAX_KEPT_TOKENS`.
    """

    token_ids: Tensor
    counts: Tensor

    def to_cpu_nonblocking(self) -> "KeptTokenTensors":
        """Returns the tensors on the host, which are complete once this stream has come so far."""
        return KeptTokenTensors(
            token_ids=self.token_ids.to("cpu", non_blocking=True),
            counts=self.counts.to("cpu", non_blocking=True),
        )

    def tolists(self, _: np.ndarray | None = None) -> SamplingMaskLists:
        """Returns the sets one after the other, as vLLM's scheduler reads them."""
        counts = self.counts.numpy().astype(np.int64)
        width = int(counts.max(initial=0))
        is_kept = np.arange(width) < counts[:, None]
        token_ids = self.token_ids.numpy()[:, :width]
        offsets = np.concatenate([[0], counts.cumsum()])
        return SamplingMaskLists(token_ids[is_kept], offsets)


def sample(
    logits: Tensor, requests: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a sampled token, int64, and its log-probability, float32, of each row of `logits`.

    The third result, int32 [rows, parts of the vocabulary], counts the tokens of each part that
    could have been sampled. `logits` are [rows, vocabulary], divided by their temperature.
    `requests` has each row's place in `temperatures`, where 0 takes the highest logit, and in
    `seeds`; or -1, where nothing is asked for. `positions` are those of the rows in their
    sequences.
    """
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, _BLOCK)
    block_results = logits.new_empty(3, rows, parts, dtype=torch.float32)
    places = logits.new_empty(rows, parts, dtype=torch.int32)
    part_counts = torch.empty_like(places)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    logprobs = logits.new_empty(rows, dtype=torch.float32)
    at = logits, logits.stride(0)
    _read_kernel[(rows, parts)](
        *at,
        requests,
        temperatures,
        seeds,
        positions,
        *block_results,
        places,
        part_counts,
        vocabulary,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _choose_kernel[(rows,)](
        *at,
        *block_results,
        places,
        tokens,
        logprobs,
        parts,
        PARTS=triton.next_power_of_2(parts),
        num_warps=1,
    )
    return tokens, logprobs, part_counts


def kept_token_tensors(logits: Tensor, part_counts: Tensor) -> KeptTokenTensors:
    """Returns the tokens of each row of `logits` that could have been sampled.

    `logits` are [rows, vocabulary], and minus infinity at all other tokens. `part_counts` is that
    of `sample`.
    """
    rows, vocabulary = logits.shape
    _, parts = part_counts.shape
    room = min(vocabulary, MAX_KEPT_TOKENS)
    token_ids = part_counts.new_empty(rows, room)
    ends = part_counts.cumsum(dim=1, dtype=torch.int32)
    _keep_kernel[(rows, parts)](
        logits,
        logits.stride(0),
        part_counts,
        ends,
        token_ids,
        room,
        vocabulary,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    counts = ends[:, -1]
    return KeptTokenTensors(token_ids, counts.masked_fill(counts > MAX_KEPT_TOKENS, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    requests,
    temperatures,
    seeds,
    positions,
    noisy,
    highest,
    sums,
    places,
    part_counts,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    values = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf"))
    values = values.to(tl.float32)
    request = tl.load(requests + row)
    temperature = tl.load(temperatures + request, mask=request >= 0, other=0.0)
    seed = tl.load(seeds + request, mask=request >= 0, other=0)
    noisy_top, place = gumbel_noised_argmax(
        values,
        tokens,
        inside,
        seed,
        tl.load(positions + row),
        temperature,
        IS_DRAFTING=False,
        USE_FP64=False,
        APPLY_TEMPERATURE=False,
    )
    top = tl.max(values, axis=0)
    # All tokens of a part may be forbidden.
    shifted = tl.where(values == float("-inf"), float("-inf"), values - top)
    at = row * tl.num_programs(1) + part
    tl.store(noisy + at, noisy_top)
    tl.store(highest + at, top)
    tl.store(sums + at, tl.sum(tl.exp(shifted), axis=0))
    tl.store(places + at, part * BLOCK + place)
    is_kept = (values > float("-inf")) & (values < float("inf"))
    tl.store(part_counts + at, tl.sum(is_kept.to(tl.int32), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _keep_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    part_counts,
    ends,
    token_ids,
    room,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = row * tl.num_programs(1) + part
    count = tl.load(part_counts + at)
    # Most parts have no token that is kept.
    if count > 0:
        start = tl.load(ends + at) - count
        tokens = part * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocabulary
        values = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf"))
        values = values.to(tl.float32)
        is_kept = (values > float("-inf")) & (values < float("inf"))
        steps = is_kept.to(tl.int32)
        columns = start + tl.cumsum(steps, axis=0) - steps
        tl.store(token_ids + row * room + columns, tokens, mask=is_kept & (columns < room))


@triton.jit  # type: ignore[untyped-decorator]
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    noisy,
    highest,
    sums,
    places,
    tokens,
    logprobs,
    parts,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block_parts = tl.arange(0, PARTS)
    at = row * parts + block_parts
    inside = block_parts < parts
    part = tl.argmax(tl.load(noisy + at, mask=inside, other=float("-inf")), axis=0)
    token = tl.load(places + row * parts + part).to(tl.int64)
    tops = tl.load(highest + at, mask=inside, other=float("-inf"))
    top = tl.max(tops, axis=0)
    total = tl.sum(tl.load(sums + at, mask=inside, other=0.0) * tl.exp(tops - top), axis=0)
    value = tl.load(logits + row * stride + token).to(tl.float32)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, value - top - tl.log(total))
