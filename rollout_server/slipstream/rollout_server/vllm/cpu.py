"""vLLM on CPUs: workers that also return experts and kept tokens, and repairs.

Import this module on CPUs only: its imports change torch.

vLLM (0.32.0) returns experts, and the tokens that a token was drawn from, only from its newer model
runner, which needs Triton. CPUs run the older model runner. `KeptTokensWorker` and `RoutingWorker`
give the same outputs, so that scheduler, cached prefixes and outputs are vLLM's own.

vLLM gives each drafted token the temperature, top-p and top-k of its request. On CPUs it writes
floating-point values into a copy of its output and drops the copy, so that drafts are verified with
whatever the memory held. Its top-k alone fails in a step without any draft. `repair` corrects both,
its rotary embedding of latent attention, whose kernel for CPUs takes one head for all, its routers,
which take sigmoid scores only with groups of experts, and stages behind the first one, which have
no memory for what the stage before them sends.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from slipstream.core.kept_tokens import MAX_KEPT_TOKENS
from torch import Tensor
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.utils import cpu_triton_utils
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class KeptTokensSampler(Sampler):  # type: ignore[misc]
    """Notes which tokens each token of a step was drawn from."""

    # [requests, vocabulary]: those of the last step, as the noise of the draw was added to them.
    _logprobs: Tensor | None = None

    def sample(
        self,
        *arguments: object,
        **keywords: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Overrides vLLM's method, whose log-probabilities are those after every cut."""
        tokens, logprobs = super().sample(*arguments, **keywords)
        self._logprobs = logprobs
        return tokens, logprobs

    def take_masks(self, num_requests: int) -> SamplingMaskLists:
        """Returns the tokens of the last step's requests; none of a request with too many."""
        logprobs = self._logprobs
        self._logprobs = None
        if logprobs is None:
            no_ids = np.zeros(0, dtype=np.int32)
            num_offsets = num_requests + 1
            return SamplingMaskLists(
                token_ids=no_ids,
                offsets=np.zeros(num_offsets, dtype=np.int64),
            )
        is_kept = logprobs > -torch.inf
        counts = is_kept.sum(dim=-1)
        has_room = counts <= MAX_KEPT_TOKENS
        is_kept &= has_room[:, None]
        _, token_ids = is_kept.nonzero(as_tuple=True)
        ends = np.cumsum(counts * has_room)
        small_ids = token_ids.to(torch.int32)
        offsets = np.concatenate([[0], ends])
        return SamplingMaskLists(
            token_ids=small_ids.numpy(),
            offsets=offsets,
        )


class KeptTokensWorker(CPUWorker):  # type: ignore[misc]
    """Returns the tokens that each token was drawn from along with it."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Overrides vLLM's method, which makes the sampler."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        self.model_runner.sampler.__class__ = KeptTokensSampler

    def sample_tokens(self, grammar_output: Any) -> Any:  # noqa: ANN401 - vLLM's
        """Overrides vLLM's method; adds the tokens that the step's tokens were drawn from."""
        output = super().sample_tokens(grammar_output)
        num_requests = len(output.req_ids)
        if num_requests:
            sampler = self.model_runner.sampler
            output.sampling_masks = sampler.take_masks(num_requests)
        return output


class RoutingWorker(CPUWorker):  # type: ignore[misc]
    """Returns the experts of each step's tokens along with its sampled tokens."""

    _pending: PendingAuxOutput | None = None

    def initialize_from_config(self, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        """Overrides vLLM's method; afterwards the routers report the experts that they choose."""
        super().initialize_from_config(kv_cache_config)
        self._connector = get_aux_output_connector(
            self.model_runner.get_model(), self.vllm_config, kv_cache_config
        )

    def execute_model(self, scheduler_output: Any) -> Any:  # noqa: ANN401 - vLLM's
        """Overrides vLLM's method; returns None if `sample_tokens` must be called next."""
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output)
        if output is None:
            batch = self.model_runner.input_batch
            lengths = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
            # The part of vLLM's input batch that the connector reads. Request n has the tokens from
            # `query_start_loc_np[n]` up to `query_start_loc_np[n + 1]`.
            step = SimpleNamespace(
                req_ids=list(batch.req_ids),
                query_start_loc_np=np.concatenate([[0], np.cumsum(lengths)]),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(lengths)].copy(),
            )
            self._pending = self._connector.prepare_output(step)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:  # noqa: ANN401 - vLLM's
        """Overrides vLLM's method; adds the experts of the tokens that `execute_model` computed."""
        output = super().sample_tokens(grammar_output)
        pending = self._pending
        self._pending = None
        if pending is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            assert output.req_ids == pending.request_ids
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output


class KeptTokensRoutingWorker(RoutingWorker, KeptTokensWorker):
    """Returns experts and kept tokens."""


_make_router = CPURouter.__init__
_rotate = RotaryEmbedding.forward_cpu
_top_k = topk_topp_sampler.apply_top_k_only
_gather_inputs = GPUModelRunner.sync_and_gather_intermediate_tensors


def repair() -> None:
    """Corrects vLLM on CPUs, in this process and its later forks."""
    cpu_triton_utils._expand_kernel_impl = expand
    topk_topp_sampler.apply_top_k_only = lambda x, k: _top_k(x, k) if len(k) else x
    CPURouter.__init__ = _made
    RotaryEmbedding.forward_cpu = _rotated
    GPUModelRunner.sync_and_gather_intermediate_tensors = _gathered_inputs


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803 - vLLM's name
) -> None:
    """Writes `values[n]` to `output` for each token of request n.

    `cu_num_tokens` has the number of tokens up to the end of each request. Values equal to
    `replace_from` are replaced by `replace_to`.
    """
    lengths = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = values.where(values != replace_from, replace_to).to(output.dtype)
    output.copy_(replaced.repeat_interleave(lengths.long()))


def _made(self: CPURouter, *args: object, **keywords: object) -> None:
    _make_router(self, *args, **keywords)
    if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
        self.use_grouped_topk = True
        self.num_expert_group = 1
        self.topk_group = 1


def _rotated(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    # Other attention has the heads of a token in one dimension.
    rotate = _rotate if query.dim() == 2 else RotaryEmbedding.forward_native
    rotated: tuple[Tensor, Tensor | None] = rotate(self, positions, query, key)
    return rotated


def _gathered_inputs(self: GPUModelRunner, *arguments: object, **keywords: object) -> object:
    if self.intermediate_tensors is None:
        # vLLM makes this memory in a warm-up, which eager engines on CPUs do not have.
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )
    return _gather_inputs(self, *arguments, **keywords)
