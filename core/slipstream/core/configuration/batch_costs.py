"""Says what batches cost: processors of the controller and of ranks, main memory, training.

Figures are of batches whose episodes all have the same length. All but a part of the controller's
grow in proportion to that length, so their ratios hold for any.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.core.configuration.automatic import ON_GPUS
from slipstream.core.configuration.batch_bytes import BatchBytes, shown_bytes
from slipstream.core.configuration.node_plan import TRAINED_FLOPS
from slipstream.core.models.model_sizes import ModelSizes
from slipstream.core.settings.config import Config

# Measured by benchmarks/controller/batches.py, without TLS (benchmarks/results/controller.md). The
# controller's processor seconds, which are mostly those of one core, to receive, check, journal and
# send a trajectory, and each of its bytes.
CONTROLLER_TRAJECTORY_S = 0.38e-3
CONTROLLER_BYTE_S = 5.75e-9
# Batches in the controller's main memory beside the trajectories that wait.
CONTROLLER_FURTHER_BATCHES = 1.6
# A trainer rank's processor seconds to receive a token of any episode, a byte of experts, and a
# byte of the tokens that a sampled token was drawn from.
RANK_TOKEN_S = 1.19e-7
RANK_EXPERTS_BYTE_S = 0.79e-9
RANK_KEPT_BYTE_S = 8.4e-9
DAY_S = 86400.0


@dataclass(frozen=True)
class BatchCosts:
    """What a step's batch costs, in seconds unless the name says otherwise."""

    controller_s: float
    rank_s: float
    # What training takes by the speed of dense models on H200s; None of a model that is not for
    # GPUs.
    training_s: float | None
    # The most of the controller's main memory that finished trajectories take.
    controller_bytes: int

    @classmethod
    def of(cls, config: Config, sizes: ModelSizes, batch_bytes: BatchBytes) -> "BatchCosts":
        """Returns the costs of a batch of the longest episodes."""
        algorithm = config.algorithm
        num_tokens = batch_bytes.num_episodes * batch_bytes.tokens_per_episode
        experts_bytes = num_tokens * batch_bytes.experts_per_token
        of_trajectories_s = batch_bytes.num_episodes * CONTROLLER_TRAJECTORY_S
        training_s = None
        if config.model.dtype != "float32" and sizes.parameters >= ON_GPUS:
            # Without gradients of the weights, which adapters replace, a third is saved.
            per_parameter = 4 if config.lora.rank else 6
            num_operations = per_parameter * sizes.active_parameters * num_tokens * algorithm.epochs
            training_s = num_operations / (TRAINED_FLOPS * config.learner.world_size)
        num_batches = algorithm.max_staleness + 1 + CONTROLLER_FURTHER_BATCHES
        return cls(
            controller_s=of_trajectories_s + batch_bytes.batch * CONTROLLER_BYTE_S,
            rank_s=num_tokens * RANK_TOKEN_S
            + experts_bytes * RANK_EXPERTS_BYTE_S
            + num_tokens * batch_bytes.kept_per_token * RANK_KEPT_BYTE_S,
            training_s=training_s,
            controller_bytes=round(num_batches * batch_bytes.batch),
        )

    @property
    def least_step_s(self) -> float:
        """The seconds of a step that the controller and, where known, training need."""
        return max(self.controller_s, self.training_s or 0.0)

    def describe(self, batch_bytes: BatchBytes) -> Iterator[str]:
        """Yields the lines of a dry run."""
        yield (
            f"the controller takes {self.controller_s:,.1f} s of a processor for it, and "
            f"{shown_bytes(self.controller_bytes)} of main memory with the batches that may wait"
        )
        yield f"a trainer rank takes {self.rank_s:,.1f} s of a processor to read it"
        if self.training_s is not None:
            yield (
                f"training takes about {self.training_s:,.1f} s at {TRAINED_FLOPS / 1e12:,.0f} "
                "TFLOP/s a rank, as dense models have on H200s"
            )
        a_day = batch_bytes.batch * DAY_S / self.least_step_s
        yield f"the journal grows by at most {shown_bytes(a_day)} a day"

    def warnings(self, config: Config, batch_bytes: BatchBytes) -> Iterator[str]:
        """Yields a line for each part of a plan that works, and is slower than its learner."""
        if self.training_s is None or self.controller_s <= self.training_s:
            return
        remedies = []
        if batch_bytes.experts_per_token:
            remedies.append('set algorithm.router_replay = "off"')
        if config.replays_sampling:
            remedies.append("lower sampling.top_k, or sample without top_p, top_k and min_p")
        if config.sampling.max_images:
            remedies.append("lower sampling.max_images or max_image_bytes")
        remedy = "; or ".join(remedies) or "give the learner fewer ranks"
        yield (
            f"the controller, mostly one processor, takes {self.controller_s:,.1f} s for a batch "
            f"of {shown_bytes(batch_bytes.batch)}, and training about {self.training_s:,.1f} s: "
            f"steps wait for the controller; {remedy}"
        )
