"""A reward model behind vLLM's endpoint `/classify` that scores conversations.

Waits for: the endpoint. Unblocked by: its answer, or `timeout_s` after the last retry.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from slipstream.environments.judge import JudgeError, check_rules, in_one_line, openai_client


class RewardModel:
    """Asks a model for sequence classification for the score of a conversation.

        model = RewardModel("http://127.0.0.1:9000/v1", "reward")
        score = await model.score([{"role": "user", ...}, {"role": "assistant", ...}])

    The server applies the model's chat template. One instance serves all episodes of a worker. At
    most `max_open` calls are open at one time; each is repeated as those of `Judge` are.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        label: int = 0,
        as_probability: bool = False,
        api_key: str = "none",
        max_open: int = 16,
        timeout_s: float = 60.0,
        max_retries: int = 5,
    ) -> None:
        """The score is the output number `label` of the model's head, as a probability or raw.

        ConfigError names what cannot work.
        """
        check_rules(
            (label >= 0, f"label must be at least 0, got {label}"),
            (max_open >= 1, f"max_open must be at least 1, got {max_open}"),
            (max_retries >= 0, f"max_retries must be at least 0, got {max_retries}"),
            (
                math.isfinite(timeout_s) and timeout_s > 0,
                f"timeout_s must be above 0, got {timeout_s}",
            ),
        )
        self._client = openai_client(base_url, api_key).with_options(
            timeout=timeout_s, max_retries=max_retries
        )
        # vLLM has this call beside /v1, not below it.
        self._url = base_url.rstrip("/").removesuffix("/v1") + "/classify"
        self._name = f"the reward model {model} at {base_url}"
        self._model, self._label, self._as_probability = model, label, as_probability
        self._open = asyncio.Semaphore(max_open)

    async def score(self, messages: Sequence[Mapping[str, str]]) -> float:
        """Returns the model's score of a conversation; JudgeError names why there is none."""
        import openai

        body = {
            "model": self._model,
            "messages": list(messages),
            "use_activation": self._as_probability,
        }
        async with self._open:
            try:
                answer = await self._client.post(self._url, body=body, cast_to=object)
            except openai.OpenAIError as error:
                kind = type(error).__name__
                raise JudgeError(f"{self._name} failed: {kind}: {in_one_line(str(error))}") from (
                    error
                )
        outputs = _outputs(answer)
        if outputs is None:
            raise JudgeError(
                f"{self._name} must answer as vLLM's /classify does, "
                f"got {in_one_line(str(answer))!r}"
            )
        if self._label >= len(outputs):
            raise JudgeError(f"{self._name} has {len(outputs)} outputs, no number {self._label}")
        score = outputs[self._label]
        if not math.isfinite(score):
            raise JudgeError(f"{self._name} must give a finite number, got {score}")
        return score


def _outputs(answer: object) -> list[float] | None:
    """Returns the outputs of the only conversation of an answer; None where it has another form."""
    data = answer.get("data") if isinstance(answer, dict) else None
    first = data[0] if isinstance(data, list) and len(data) == 1 else None
    found = first.get("probs") if isinstance(first, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, int | float) for one in found):
        return None
    return [float(one) for one in found]
