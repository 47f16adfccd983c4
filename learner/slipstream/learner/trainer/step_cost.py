"""The metrics of a training step's cost: FLOPs and memory."""

import logging

import psutil
import torch
from slipstream.core.models.model_sizes import read_model_table
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.flops import model_sizes, peak_tflops, training_flops
from slipstream.learner.trainer.model.model import Policy
from slipstream.learner.trainer.step import TrainedStep

logger = logging.getLogger(__name__)


class StepCost:
    """Metrics of a step's cost: FLOPs, FLOPs per second, and the largest memory use of any rank."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self._ranks, self._sharing = policy.ranks, policy.sharing
        self._sizes = model_sizes(read_model_table(config.model.path))
        self._epochs = config.algorithm.epochs
        self._peak_tflops: float | None = None
        if policy.ranks.device.type == "cuda":
            name = torch.cuda.get_device_name()
            self._peak_tflops = peak_tflops(name)
            if self._peak_tflops is None:
                logger.warning("no mfu: the peak of %s is not known", name)

    def metrics(self, batch: Batch, result: TrainedStep) -> dict[str, float]:
        """Returns the metrics of the step that trained `batch`; collective.

        `mfu` is left out if the peak FLOPs of the device are not known.
        """
        sizes, saved = batch.lengths, (0, 0) if self._sharing is None else self._sharing.saved
        flops = self._epochs * training_flops(self._sizes, sizes, saved=saved)
        computed = self._epochs * (sum(sizes) - saved[0])
        tflops = flops / result.wall_s / self._ranks.world_size / 1e12
        found = {
            "tokens_per_micro_batch": computed / result.metrics["num_micro_batches"],
            "model_flops": flops,
            "tflops_per_rank": tflops,
            **self._memory(),
        }
        if self._peak_tflops is not None:
            found["mfu"] = tflops / self._peak_tflops
        return found

    def _memory(self) -> dict[str, float]:
        """Returns the largest memory use of any rank; collective."""
        used = {"trainer_rss_bytes": psutil.Process().memory_info().rss}
        if self._ranks.device.type == "cuda":
            used["gpu_allocated_bytes"] = torch.cuda.max_memory_allocated()
            used["gpu_reserved_bytes"] = torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
        values = torch.tensor(list(used.values()), dtype=torch.float64)
        return dict(zip(used, self._ranks.max(values).tolist(), strict=True))
