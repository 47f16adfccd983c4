"""The outputs of several steps of a request, joined into one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from slipstream.core.errors import ConfigError
from slipstream.rollout_server.vllm.steady_decoding import SteadyRequest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

CHUNK_TOKENS = 16
# The fields of an output, by how the outputs of several steps become one. A vLLM with other fields
# is refused.
_FIELDS = {
    # Added up.
    *("new_token_ids", "new_logprobs", "routed_experts", "events"),
    # Taken from the first step.
    *("prefill_stats", "new_prompt_logprobs_tensors"),
    # Taken from the last step.
    *("request_id", "finish_reason", "stop_reason", "trace_headers", "num_nans_in_logits"),
    *("kv_transfer_params", "ec_transfer_params"),
    # Never set: fields of pooling, images, counts of drafts, scoring and sampling masks.
    *("pooling_output", "mm_cache_miss_hashes", "new_sampling_mask", "spec_decode_metrics"),
    "prompt_token_id_logprobs",
}


def check_outputs(fields: Iterable[str]) -> None:
    """Raises ConfigError when `fields` of vLLM's outputs are not those that can be joined here."""
    if set(fields) != _FIELDS:
        names = ", ".join(sorted(_FIELDS.symmetric_difference(fields)))
        raise ConfigError(f"this vLLM's engine outputs differ from 0.32.0's in: {names}")


@dataclass(slots=True)
class Chunk:
    """The sampled outputs of a request that are not handed out yet."""

    client_index: int
    limit: int
    with_logprobs: bool
    # None: vLLM handles every step of this request.
    steady: SteadyRequest | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed_experts: list[np.ndarray] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    prefill_stats: Any = None
    prompt_logprobs: Any = None

    def keep(self, output: EngineCoreOutput) -> None:
        """Takes the fields other than tokens: first-step fields, events and recorded experts."""
        if output.routed_experts is not None:
            self.routed_experts.append(output.routed_experts)
        if output.events:
            self.events += output.events
        if output.prefill_stats is not None:
            self.prefill_stats = output.prefill_stats
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = output.new_prompt_logprobs_tensors

    def pour(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Moves everything that is held into `output`, and returns it."""
        if self.with_logprobs and len(self.logprobs) != len(self.token_ids):
            raise RuntimeError(
                f"{len(self.logprobs)} log-probabilities for {len(self.token_ids)} sampled tokens"
            )
        output.new_token_ids = self.token_ids
        if self.with_logprobs and self.token_ids:
            output.new_logprobs = LogprobsLists(
                np.asarray(self.token_ids, dtype=np.int32)[:, None],
                np.asarray(self.logprobs, dtype=np.float32)[:, None],
                # The rank of the sampled token, which no caller asks for.
                np.zeros(len(self.token_ids), dtype=np.int32),
            )
        if self.routed_experts:
            output.routed_experts = np.concatenate(self.routed_experts)
        output.events = self.events or None
        output.prefill_stats = self.prefill_stats
        output.new_prompt_logprobs_tensors = self.prompt_logprobs
        self.token_ids, self.logprobs = [], []
        self.routed_experts, self.events = [], []
        self.prefill_stats = self.prompt_logprobs = None
        self.limit = CHUNK_TOKENS
        return output
