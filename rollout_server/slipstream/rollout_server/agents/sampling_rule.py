"""The run's sampling holds for every call of an agent: what a request asks otherwise is told.

Tokens that are trained must come from the distribution of the run. A request may only shorten its
reply (`max_tokens`, `stop`) and, where nothing is drafted, choose its `seed`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from slipstream.rollout_server.engine_interface import Sampling

SAMPLING_HEADER = "x-slipstream-sampling"
_MAX_HEADER = 1000
# The values that hold where the run has no setting of that name.
_NEUTRAL: dict[str, object] = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
}
# Settings that would constrain what is sampled; they are taken out of the request.
_CONSTRAINTS = (
    *("response_format", "structured_outputs", "bad_words", "allowed_token_ids"),
    *("min_tokens", "thinking_token_budget", "repetition_detection", "ignore_eos"),
    *("output_format", "logit_bias", "stop_token_ids", "watermarking"),
)
# Limits of a reply, which hold below the run's.
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Settings for other uses of vLLM, which would replace the prompt or send the reply elsewhere.
_FOREIGN = ("kv_transfer_params", "ec_transfer_params", "cache_salt", "priority", "vllm_xargs")


class RefusedRequest(Exception):
    """A request that cannot be served; the message names the value and what to do.

    `code` and `param` are what clients of OpenAI's API find in the error.
    """

    def __init__(
        self, message: str, *, code: str = "invalid_request", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True)
class Ruled:
    """A request under the run's sampling; `told` is the value of `SAMPLING_HEADER`, "" if none."""

    body: dict[str, Any]
    told: str


def rule(
    body: dict[str, Any], sampling: Sampling, *, auto: object = "auto", has_drafts: bool = False
) -> Ruled:
    """Applies the rule to the JSON body of a request; RefusedRequest for what no reply can be.

    `auto` is the value of `tool_choice` by which the API leaves the choice to the model. An engine
    that `has_drafts` takes no seed: drafts repeat earlier replies. If the random numbers behind
    these came again, likely tokens would be accepted more often than their probability.
    """
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise RefusedRequest(f"{name} must be 1, got {body[name]!r}: send one call for each")
    most = body.get("top_logprobs")
    if isinstance(most, int) and most < 0:
        # vLLM takes it for all of the vocabulary.
        raise RefusedRequest(f"top_logprobs must be at least 0, got {most}", param="top_logprobs")
    if body.get("use_beam_search"):
        raise RefusedRequest("use_beam_search is refused: replies are sampled")
    told, kept = [], dict(body)
    for name in _LENGTHS:
        if isinstance(body.get(name), int):
            kept[name] = min(body[name], sampling.max_reply_tokens)
    holds = _NEUTRAL | sampling.distribution
    for name, value in holds.items():
        asked = body.get(name)
        if asked is not None and asked != value:
            told.append(f"{name}={_word(value)} (asked {_word(asked)})")
    nothing: tuple[object, ...] = (None, [], {}, False, 0)
    dropped = [name for name in _CONSTRAINTS if kept.pop(name, None) not in nothing]
    told += [f"{name}=none (asked)" for name in dropped if name not in holds]
    for name in _FOREIGN:
        kept.pop(name, None)
    if has_drafts and kept.pop("seed", None) is not None:
        told.append("seed=none (asked)")
    for name in ("text", "output_config"):
        part = kept.get(name)
        if isinstance(part, dict) and part.get("format") is not None:
            kept[name] = {key: value for key, value in part.items() if key != "format"}
            if part["format"] != {"type": "text"}:
                told.append(f"{name}.format=none (asked)")
    choice = kept.get("tool_choice")
    if _is_forced(choice):
        kept["tool_choice"] = auto
        told.append("tool_choice=auto (asked)")
    return Ruled(kept, "; ".join(told)[:_MAX_HEADER])


def _is_forced(choice: object) -> bool:
    if isinstance(choice, dict):
        return choice.get("type") not in ("auto", "none")
    return choice not in (None, "auto", "none")


def _word(value: object) -> str:
    # JSON has neither control characters nor letters that a header may not hold.
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)[:100]
