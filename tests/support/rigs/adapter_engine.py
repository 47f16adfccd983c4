"""An engine that is sent weights and adapters apart, against transformers with both merged."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from slipstream.core.settings.role_sections import FUSED, matrices_named
from slipstream.rollout_server.engine_interface import LoadedWeights, Sampling

from support.fakes.gloo_sender import GlooSender, layout_of
from support.rigs.engine_rig import Reference
from support.rigs.started_engine import publish
from support.rigs.waiting import LIMIT_S

Weights = dict[str, torch.Tensor]
RANK = 4
SCALE = 3.0
MATRICES = {part for parts in matrices_named(FUSED).values() for part in parts}
SAMPLING = Sampling(1.0, 1.0, 0, 200, 1, 250, ignore_eos=True)
SEQUENCE = [1, 4, 9, 13, 22, 30, 5, 7, 7, 8]


def adapters_for(weights: Weights, seed: int) -> Weights:
    """Factors of which both matter, by PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, matrix in weights.items():
        if name.split(".")[-2] in MATRICES:
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            outputs, inputs = matrix.shape
            for factor, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                values = torch.randn(shape, generator=generator) * 0.1
                tensors[f"{prefix}.lora_{factor}.weight"] = values.to(matrix.dtype)
    return tensors


def merged(weights: Weights, adapters: Weights) -> Weights:
    result = {}
    for name, matrix in weights.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapters:
            a, b = (adapters[f"{prefix}.lora_{factor}.weight"] for factor in "AB")
            matrix = matrix + SCALE * b @ a
        result[name] = matrix
    return result


@dataclass
class Rig:
    engine: object
    folder: Path
    base: Weights
    has_plan: bool
    sender: GlooSender | None = None
    publishes: int = 0

    async def publish(
        self,
        weights: Weights,
        adapters: Weights,
        *,
        most: int | None = None,
        deadline_s: float = LIMIT_S,
        names: Sequence[str] = (),
        more: Sequence[Weights] = (),
    ) -> LoadedWeights:
        """A whole publish; without `weights` of the adapters alone.

        `deadline_s`: so long engine and sender wait for each other at a bucket. `names`: those of
        several adapters, `adapters` and `more`.
        """
        layout = layout_of(weights)
        layout.adapters.extend(layout_of(adapters).tensors)
        layout.adapter_scale = SCALE
        layout.adapter_names.extend(names)
        self.publishes += 1
        if self.sender is None:
            self.sender = GlooSender(
                f"communicator-{self.publishes}", num_workers=self.engine.num_workers
            )
        self.sender.deadline_s = deadline_s
        order = self.sender.order(f"p{self.publishes}", self.publishes)
        order.adapters_alone = not weights
        tensors = weights | adapters
        return await publish(
            self.engine,
            self.sender,
            order,
            layout,
            tensors,
            max_buckets=most,
            more=more,
        )

    def expected(
        self, weights: Weights, adapters: Weights, tokens: list[int]
    ) -> np.ndarray:
        """Log-probability of every token but the first, by transformers with merged weights."""
        return Reference(self.folder).logprobs(merged(weights, adapters), tokens)

    async def gap(self, weights: Weights, adapters: Weights) -> float:
        scored = await self.engine.teacher_forced_logprobs([SEQUENCE])
        return float(np.abs(self.expected(weights, adapters, SEQUENCE) - scored).mean())
