"""Makes the parts of a trainer that the settings ask for; the modules of others stay unimported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.step import StepPart
from slipstream.learner.trainer.weights.publish import Published

if TYPE_CHECKING:
    from slipstream.extensions.prefix_sharing.trainer import PrefixSharing
    from slipstream.extensions.stored_weights.trainer import VersionWriter


def step_parts(config: Config, policy: Policy) -> list[StepPart]:
    """Returns the parts of steps, with their models, or raises ConfigError; collective."""
    found: list[StepPart] = []
    if config.debug.profile.start_step is not None:
        from slipstream.extensions.profiles.trainer import ProfileWindow

        folder = config.run_dir / "profile"
        found.append(ProfileWindow(config.debug.profile, folder, rank=policy.ranks.rank))
    if config.controller.turns == "sleep":
        from slipstream.extensions.turns.trainer import LockedSteps

        found.append(LockedSteps(config, policy.ranks.gpus))
    if policy.sharing is not None:
        found.append(_SharedWork(policy.sharing))
    if config.needs_reference or config.roles:
        from slipstream.extensions.other_models.trainer import Roles

        found.append(Roles(config, policy))
    if policy.drafts is not None:
        from slipstream.extensions.drafts.trainer import DraftTraining

        found.append(DraftTraining(policy.drafts, policy, config))
    if config.algorithm.router_replay != "off":
        from slipstream.extensions.router_replay.trainer import Routing

        found.append(Routing(policy.chunks))
    return found


def open_writer(
    config: Config, policy: Policy, published: Published, client: ControllerClient
) -> VersionWriter | None:
    """Returns the writer of versions to storage; None without `weights.storage_url`."""
    if config.weights.storage_url is None:
        return None
    from slipstream.extensions.stored_weights.trainer import VersionWriter

    return VersionWriter(published, config.weights, ranks=policy.ranks, client=client)


class _SharedWork(StepPart):
    def __init__(self, sharing: PrefixSharing) -> None:
        self._sharing = sharing

    def begins(self) -> None:
        self._sharing.begin_step()

    def ends(self, policy: Policy, batch: Batch) -> dict[str, float]:
        return {"shared_tokens": float(self._sharing.saved.tokens)}
