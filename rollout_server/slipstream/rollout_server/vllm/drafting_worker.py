"""vLLM's worker for GPUs with drafts from `DraftTable`, made after each step on the GPU itself.

vLLM's asynchronous scheduler plans a step before it knows the tokens of the previous step. It can
do so with these drafts too: they are made on the GPU, where those tokens are.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from slipstream.rollout_server.inference.draft_table import PROMPT_TOKENS, DraftTable
from vllm.distributed import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu_worker import Worker


class SharedText(BaseSpeculator):  # type: ignore[misc]
    """Drafts tokens for speculative decoding from the texts of all requests of an engine."""

    supports_mm_inputs = False
    # vLLM accepts a drafted token with the probability that the model gives it.
    draft_logits = None

    def __init__(
        self,
        draft_tokens: int,
        device: torch.device,
        states: RequestState,
        agreed: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """`states` has the worker's request tables.

        `agreed` returns the first rank's tensor on every rank; it is collective.
        """
        self._length, self._device = draft_tokens, device
        self._states, self._agreed = states, agreed
        self._table = DraftTable(self._length, device=device)
        self._back = torch.arange(self._length + 1, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:  # noqa: ANN401 - vLLM's
        """Implements vLLM's method; does nothing, since drafts need no graph."""

    def capture(self) -> None:
        """Implements vLLM's method; does nothing, since drafts need no graph."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        *args: Any,  # noqa: ANN401 - vLLM's
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,  # noqa: ANN401 - vLLM's
    ) -> torch.Tensor:
        """Implements vLLM's method: adds the step's tokens to the table; returns new drafts."""
        rows = input_batch.idx_mapping
        nothing = torch.zeros(len(rows), self._length, dtype=torch.int64, device=self._device)
        if dummy_run:
            return nothing
        # The arguments before `num_sampled` are metadata and hidden states, unused here.
        num_sampled = args[4]
        texts, ends = self._states.all_token_ids.gpu, self._states.total_len.gpu[rows].long()
        if input_batch.has_prefill:
            self._enter_prompts(input_batch, texts)
        places = ends[:, None] - self._length - self._back
        counts = self._back < num_sampled[:, None]
        along = rows[:, None].expand_as(places)
        self._table.enter(texts, along.flatten(), places.flatten(), counts.flatten())
        if not num_speculative_tokens:
            return nothing
        drafts = self._table.draft(texts, rows, ends)
        # Ranks may keep different entries if a step writes two to one slot, but need equal drafts.
        return self._agreed(drafts)

    def _enter_prompts(self, batch: InputBatch, texts: torch.Tensor) -> None:
        rows, places = prompt_places(batch, self._length)
        if len(rows):
            along = async_tensor_h2d(rows, self._device)
            behind = async_tensor_h2d(places, self._device)
            self._table.enter(texts, along, behind, torch.ones_like(behind, dtype=torch.bool))


def prompt_places(batch: InputBatch, draft_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and positions of this step's prompt tokens with which a draft can begin.

    A draft's `draft_tokens` tokens must all be in the prompt. A row is a request's index in the
    worker's tables. Of each request only the last `PROMPT_TOKENS` such tokens are returned.
    """
    rows, places = [], []
    for index in np.flatnonzero(batch.is_prefilling_np):
        first = int(batch.num_computed_tokens_np[index])
        end = first + int(batch.num_scheduled_tokens[index])
        last = min(end, int(batch.prefill_len_np[index]) - draft_tokens + 1)
        found = np.arange(first, last, dtype=np.int64)[-PROMPT_TOKENS:]
        places.append(found)
        rows.append(np.full(len(found), batch.idx_mapping_np[index], dtype=np.int64))
    return np.concatenate(rows), np.concatenate(places)


class DraftingWorker(Worker):  # type: ignore[misc]
    """vLLM's GPU worker with speculative decoding: drafts come from the texts of all requests."""

    def _make_model_runner(self) -> Any:  # noqa: ANN401 - vLLM's
        """Overrides vLLM's method to add the drafts.

        Raises RuntimeError if vLLM chose its older model runner, which cannot take these drafts.
        """
        if not self.use_v2_model_runner:
            raise RuntimeError(
                'rollout_server.drafts is "shared", and vLLM runs this model by its older runner, '
                'which cannot take these drafts: set rollout_server.drafts = "off"'
            )
        runner = super()._make_model_runner()
        length, agreed = self.vllm_config.num_speculative_tokens, get_tp_group().broadcast
        runner.speculator = SharedText(length, self.device, runner.req_states, agreed)
        return runner
