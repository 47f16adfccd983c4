"""vLLM's worker for CPUs, which also returns the experts that each token was routed to.

vLLM (0.32.0) returns experts only from its newer model runner, which needs Triton. CPUs run the
older model runner. This worker feeds the same connector, so that scheduler, cached prefixes and
outputs are vLLM's own. Import this module on CPUs only: its imports change torch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector
from vllm.v1.worker.cpu_worker import CPUWorker


@dataclass(frozen=True)
class _Step:
    """The part of vLLM's input batch that the connector reads; the fields have vLLM's names.

    Request n has the tokens from `query_start_loc_np[n]` up to `query_start_loc_np[n + 1]`.
    """

    req_ids: list[str]
    query_start_loc_np: npt.NDArray[np.int64]
    # Tokens of each request that were computed before this step.
    num_computed_tokens_np: npt.NDArray[np.int32]


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
            self._pending = self._connector.prepare_output(self._step(scheduler_output))
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:  # noqa: ANN401 - vLLM's
        """Overrides vLLM's method; adds the experts of the tokens that `execute_model` computed."""
        output = super().sample_tokens(grammar_output)
        pending, self._pending = self._pending, None
        if pending is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            assert output.req_ids == pending.request_ids
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    def _step(self, scheduler_output: Any) -> _Step:  # noqa: ANN401 - vLLM's
        batch = self.model_runner.input_batch
        lengths = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
        return _Step(
            list(batch.req_ids),
            np.concatenate([[0], np.cumsum(lengths)]),
            batch.num_computed_tokens_cpu[: len(lengths)].copy(),
        )
