"""Drafts tokens in vLLM on CPUs, and repairs vLLM there.

`SharedTextProposer` drafts tokens. vLLM (0.32.0) gives each drafted token the temperature, top-p
and top-k of its request. On CPUs it writes floating-point values into a copy of its output and
drops the copy, so that drafts are verified with whatever the memory held. `repair_expansion`
corrects this. `compute_by_rows` replaces matrix products and norms by batch-invariant ones: a row
does not depend on other rows. Import this module on CPUs only.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from slipstream.core import row_kernels
from slipstream.rollout_server.inference.draft_table import PROMPT_TOKENS, DraftTable
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers import logits_processor, utils
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.utils import cpu_triton_utils


class SharedTextProposer:
    """Drafts tokens for speculative decoding from the texts of all requests of an engine."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Takes vLLM's configuration; vLLM makes one proposer in each worker."""
        self._length = int(vllm_config.num_speculative_tokens)
        self._longest = int(vllm_config.model_config.max_model_len)
        self._table = DraftTable(self._length)
        # The length of each row's text at the last step. A row may get another request later.
        self._ends: dict[int, int] = {}

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        **kwargs: Any,  # noqa: ANN401 - vLLM's own
    ) -> list[list[int]]:
        """Implements vLLM's method; requests with no new token, or at full length, get no draft."""
        chosen = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not chosen:
            return drafts
        texts, rows = torch.from_numpy(token_ids), torch.tensor(chosen)
        ends = torch.from_numpy(num_tokens)[rows].long()
        news = [self._new_places(row, int(num_tokens[row]), sampled_token_ids) for row in chosen]
        along = rows.repeat_interleave(torch.tensor([len(new) for new in news]))
        places = torch.cat(news)
        self._table.enter(texts, along, places, torch.ones_like(places, dtype=torch.bool))
        found = self._table.draft(texts, rows, ends).tolist()
        for row, end, draft in zip(chosen, ends.tolist(), found, strict=True):
            drafts[row] = draft if end < self._longest else []
        return drafts

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own
        """Implements vLLM's method; loads nothing."""

    def _new_places(self, row: int, end: int, sampled: list[list[int]]) -> torch.Tensor:
        """Returns the new positions in a row from which enough tokens follow for a draft.

        If the row has a new request, they are among the last `PROMPT_TOKENS` tokens.
        """
        known = self._ends.get(row, 0)
        is_same = known + len(sampled[row]) == end
        first = known - self._length + 1 if is_same else end - PROMPT_TOKENS
        self._ends[row] = end
        return torch.arange(max(1, first), max(1, first, end - self._length + 1))


def repair_expansion() -> None:
    """Replaces vLLM's expansion of sampling values by `expand`, in this process and later forks."""
    cpu_triton_utils._expand_kernel_impl = expand


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


def compute_by_rows() -> None:
    """Makes vLLM's matrix products and norms batch-invariant, in this process and its later forks.

    Products then read a layer's weights as they were loaded, without prepacking.
    """
    utils.dispatch_cpu_unquantized_gemm = _dispatch
    RMSNorm.forward_native = RMSNorm.forward_cpu = _normed
    logits_processor.LogitsProcessor._apply_head = _head


def _dispatch(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401 - vLLM's
    layer.cpu_linear = row_kernels.product


def _normed(
    self: RMSNorm, x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    # vLLM would take the norm of a sum before the sum is rounded, which the learner adds elsewhere.
    total = x if residual is None else x + residual
    found = row_kernels.norm(total, self.weight.data, self.variance_epsilon)
    return found if residual is None else (found, total)


def _head(
    self: logits_processor.LogitsProcessor,
    lm_head: Any,  # noqa: ANN401 - vLLM's
    hidden_states: Tensor,
    embedding_bias: Tensor | None,
) -> Tensor:
    dtype = self.head_dtype or hidden_states.dtype
    weight = lm_head.weight.to(dtype)
    return row_kernels.product(hidden_states.to(dtype), weight, embedding_bias)
