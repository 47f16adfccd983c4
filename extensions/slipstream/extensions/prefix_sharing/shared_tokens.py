"""Tells how many tokens of a step were shared."""

from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.model.sharing import Sharing
from slipstream.learner.trainer.step import StepPart


class SharedWork(StepPart):
    """Counts the tokens of a step that were not computed again."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def begins(self) -> None:
        self._sharing.begin_step()

    def ends(self, policy: Policy, batch: Batch) -> dict[str, float]:
        return {"shared_tokens": float(self._sharing.saved.tokens)}


def step_part(_: Config, policy: Policy) -> SharedWork | None:
    """Returns the part that counts shared work; None if the model cannot share any."""
    return None if policy.sharing is None else SharedWork(policy.sharing)
