"""A reward model behind vLLM's endpoint `/classify` that scores conversations.

Waits for: the endpoint. Unblocked by: its answer, or `timeout_s` after the last retry began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, Field
from slipstream.environments.judge import Form, JudgeError, JudgeServer, check_rules


class _Class(BaseModel, strict=True):
    probs: list[float]


class _Classes(Form):
    kind = "vLLM's /classify does"
    data: list[_Class] = Field(min_length=1, max_length=1)


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
        check_rules((label >= 0, f"label must be at least 0, got {label}"))
        self._server = JudgeServer(
            f"the reward model {model} at {base_url}",
            base_url,
            api_key=api_key,
            max_open=max_open,
            timeout_s=timeout_s,
            max_retries=max_retries,
        )
        # vLLM has this call beside /v1, not below it.
        self._url = base_url.rstrip("/").removesuffix("/v1") + "/classify"
        self._name = self._server.name
        self._model, self._label, self._as_probability = model, label, as_probability

    async def score(self, messages: Sequence[Mapping[str, str]]) -> float:
        """Returns the model's score of a conversation; JudgeError names why there is none."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "use_activation": self._as_probability,
        }
        outputs = (await self._server.ask(self._url, body, _Classes)).data[0].probs
        if self._label >= len(outputs):
            raise JudgeError(f"{self._name} has {len(outputs)} outputs, no number {self._label}")
        score = outputs[self._label]
        if not math.isfinite(score):
            raise JudgeError(f"{self._name} must give a finite number, got {score}")
        return score
