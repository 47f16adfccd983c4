"""What a training step costs: seconds of its stages, model FLOPs, and memory."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import psutil
import torch
from slipstream.core.models.model_sizes import ModelSizes, read_model_table
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.model.policy import Policy

# Dense bfloat16 TFLOP/s of one device by its name in torch, from NVIDIA's data sheets.
PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200": 989.4,
    "NVIDIA B200": 2250.0,
}
# Stages that are reported for every step, even if they took no time.
ALWAYS = ("waiting", "forward", "export", "publish", "checkpoint")


@dataclass(frozen=True)
class Arithmetic:
    """What a token is multiplied by: matrix weights without the embedding, and other tokens.

    `attention_width` is heads times head size, the mean of keys and values, summed over layers.
    """

    matrix_parameters: int
    attention_width: int

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """Returns a decoder's sizes by its config.json; all layers count like full attention."""
        sizes = ModelSizes.of(table)
        hidden = sizes.hidden
        heads = sizes.heads
        layers = sizes.layers
        queries = values = heads * sizes.head_dim
        attention = 2 * hidden * (heads + sizes.kv_heads) * sizes.head_dim
        if latent := table.get("kv_lora_rank"):
            plain, turned, value = (table[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
            queries = heads * (plain + turned)
            values = heads * value
            low = sizes.query_latent_size
            attention = low * (hidden + queries) if low else hidden * queries
            attention += hidden * sizes.latent_size + latent * (heads * plain + values)
            attention += values * hidden
        sparse = layers - sizes.dense_layers
        active = sizes.experts_per_token * sizes.expert_ffn + sizes.shared_expert_ffn
        mlps = (layers - sparse) * 3 * sizes.ffn + sparse * (sizes.experts + 3 * active)
        matrices = layers * attention + hidden * (sizes.vocab + mlps)
        return cls(matrices, layers * (queries + values) // 2)

    @property
    def attention_length(self) -> float:
        """The sequence length at which attention takes as many FLOPs as the matrix products."""
        return self.matrix_parameters / max(1, self.attention_width)

    def training_flops(self, lengths: Iterable[int], *, saved: tuple[int, int] = (0, 0)) -> float:
        """Returns the FLOPs of one forward and backward pass over sequences of these lengths.

        A matrix parameter takes 6 a token, the causal attention of L tokens 6 L^2 times its width.
        Recomputation does not count (PaLM, arXiv:2204.02311, appendix B). `saved` has the tokens
        and the sum of L^2 that shared prefixes save.
        """
        tokens = -saved[0]
        squares = -saved[1]
        for length in lengths:
            tokens = tokens + length
            squares = squares + length * length
        return 6.0 * self.matrix_parameters * tokens + 6.0 * self.attention_width * squares


class StepCost:
    """A step's cost: FLOPs, which the formula lacks for delta nets, and the memory of any rank."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self._ranks = policy.ranks
        self._sharing = policy.sharing
        table = read_model_table(config.model.path)
        self._epochs = config.algorithm.epochs
        is_delta = bool(ModelSizes.of(table).linear_heads)
        self._arithmetic = None if is_delta else Arithmetic.of(table)
        on_gpu = policy.ranks.device.type == "cuda"
        self._peak_tflops = PEAK_TFLOPS.get(torch.cuda.get_device_name()) if on_gpu else None

    def metrics(
        self,
        batch: Batch,
        *,
        wall_s: float,
        num_micro_batches: float,
    ) -> dict[str, float]:
        """Returns the metrics of the step that trained `batch` in `wall_s`; collective."""
        lengths = batch.lengths
        saved = (0, 0) if self._sharing is None else self._sharing.saved
        computed = self._epochs * (sum(lengths) - saved[0])
        metrics = {"tokens_per_micro_batch": computed / num_micro_batches}
        memory = {"trainer_rss_bytes": psutil.Process().memory_info().rss}
        if self._ranks.device.type == "cuda":
            memory["gpu_allocated_bytes"] = torch.cuda.max_memory_allocated()
            memory["gpu_reserved_bytes"] = torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
        values = torch.tensor(list(memory.values()), dtype=torch.float64)
        metrics |= zip(memory, self._ranks.max(values).tolist(), strict=True)
        if self._arithmetic is not None:
            flops = self._epochs * self._arithmetic.training_flops(lengths, saved=saved)
            tflops = flops / wall_s / self._ranks.world_size / 1e12
            metrics |= {"model_flops": flops, "tflops_per_rank": tflops}
            if self._peak_tflops is not None:
                metrics["mfu"] = tflops / self._peak_tflops
        return metrics


class StageTimes:
    """Timers of this rank's training stages: seconds since the last `take`."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(ALWAYS, 0.0)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Adds the time of the block to a stage; on a GPU it waits for the GPU's work to end."""
        started = time.monotonic()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            passed = time.monotonic() - started
            self._seconds[stage] = self._seconds.get(stage, 0.0) + passed

    def take(self) -> dict[str, float]:
        """Returns the seconds of each stage under the name `STAGE_s`, and resets them to 0."""
        seconds_of_stages = {f"{stage}_s": seconds for stage, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(ALWAYS, 0.0)
        return seconds_of_stages
