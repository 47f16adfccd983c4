"""vLLM on CPUs: a worker that also returns the experts of each token, and repairs.

Import this module on CPUs only: its imports change torch.

vLLM (0.32.0) returns experts only from its newer model runner, which needs Triton. CPUs run the
older model runner. `RoutingWorker` feeds the same connector, so that scheduler, cached prefixes and
outputs are vLLM's own.

vLLM gives each drafted token the temperature, top-p and top-k of its request. On CPUs it writes
floating-point values into a copy of its output and drops the copy, so that drafts are verified with
whatever the memory held. Its top-k alone fails in a step without any draft. `repair` corrects both,
its rotary embedding of latent attention, whose kernel for CPUs takes one head for all, and its
routers, which take sigmoid scores only with groups of experts.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.utils import cpu_triton_utils
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.cpu_worker import CPUWorker


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


_make_router = CPURouter.__init__
_rotate = RotaryEmbedding.forward_cpu
_top_k = topk_topp_sampler.apply_top_k_only


def repair() -> None:
    """Corrects vLLM on CPUs, in this process and its later forks."""
    cpu_triton_utils._expand_kernel_impl = expand
    topk_topp_sampler.apply_top_k_only = lambda x, k: _top_k(x, k) if len(k) else x
    CPURouter.__init__ = _made
    RotaryEmbedding.forward_cpu = _rotated


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


def _made(self: CPURouter, *args: object, **named: object) -> None:
    _make_router(self, *args, **named)
    if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
        self.use_grouped_topk = True
        self.num_expert_group = 1
        self.topk_group = 1


def _rotated(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    # Other attention has the heads of a token in one dimension.
    rotate = _rotate if query.dim() == 2 else RotaryEmbedding.forward_native
    found: tuple[Tensor, Tensor | None] = rotate(self, positions, query, key)
    return found
