"""Low-rank adapters (LoRA) of single experts, and their conversion for an export.

Bridge gives all experts of a rank one common adapter, so the model would depend on the number of
ranks. Here every expert has its own. The module imports Megatron, so import it only after
`compat.install`.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.layers.experts import GroupedLinear
from torch import Tensor


class ExpertAdapter(torch.nn.Module):
    """The adapters of the matrices in one `GroupedLinear`: each adds scale * B A to its matrix.

    A, the first factor, and B, the second, are split over the expert tensor parallel ranks: B
    always by rows, A like the expert's matrix. If the matrix is split by rows, the outputs of A are
    gathered. If the matrix is split by columns, the outputs of A are summed; each rank then returns
    the outputs of its rows of B and 0 for the other rows, because the outputs of the matrix are
    summed over the ranks later.
    """

    def __init__(
        self,
        base: GroupedLinear,
        *,
        rank: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.is_enabled = True
        self._group: dist.ProcessGroup = base.groups.expt_tp
        self._by_rows = base.partition_dim == 0
        ranks = self._group.size()
        outputs, inputs = base.weight0.shape
        first = (rank // ranks, inputs) if self._by_rows else (rank, inputs)
        second = (outputs, rank) if self._by_rows else (outputs // ranks, rank)
        self.first = base.like(first, partition_dim=base.partition_dim)
        self.second = base.like(second, partition_dim=0, is_gated=base.is_gated)
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor, expert: int) -> Tensor:
        """Returns the product that is added to this rank's outputs of a matrix, [tokens, out].

        `inputs` is [tokens, in], `expert` the index among this rank's experts. Collective over the
        expert tensor parallel ranks.
        """
        group = self._group
        inner = self.first(inputs, expert)
        if self._by_rows:
            inner = gather_from_tensor_model_parallel_region(inner, group=group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=group)
        inner = copy_to_tensor_model_parallel_region(inner, group=group)
        outputs: Tensor = self.scale * self.second(inner, expert)
        if self._by_rows or group.size() == 1:
            return outputs
        before = group.rank() * outputs.shape[-1]
        after = (group.size() - group.rank() - 1) * outputs.shape[-1]
        return torch.nn.functional.pad(outputs, (before, after))

    @torch.no_grad()
    def initialise(
        self,
        name: str,
        layer_number: int,
        *,
        seed: int,
    ) -> None:
        """Draws A uniformly up to 1 / sqrt(inputs), alike in every layout, and sets B to 0."""
        first_expert = self.first.groups.ep.rank() * self.first.num_experts
        ranks = self._group.size()
        dim = self.first.partition_dim
        for place in range(self.first.num_experts):
            weight = self.first.get_parameter(f"weight{place}")
            shape = list(weight.shape)
            shape[dim] *= ranks
            entropy = [seed, layer_number, zlib.crc32(name.encode()), first_expert + place]
            matrix = np.random.default_rng(entropy).uniform(-1.0, 1.0, shape) / np.sqrt(shape[1])
            weight.copy_(torch.from_numpy(matrix).chunk(ranks, dim=dim)[self._group.rank()])
            self.second.get_parameter(f"weight{place}").zero_()

    def factors(self, task: Megatron) -> tuple[Tensor, Tensor]:
        """Returns A and B of the expert whose matrix `task` exports, split like it; collective."""
        place = int(task.param_name.rpartition(".weight")[2])
        first = self.first.get_parameter(f"weight{place}").detach()
        second = self.second.get_parameter(f"weight{place}").detach()
        if self._by_rows:
            return self._whole(first), second
        return first, self._whole(second)

    def _whole(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self._group.size())]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts)


class _Changed:
    """A conversion task of Bridge whose weight is replaced by a tensor computed at each read."""

    def __init__(self, task: Megatron, weight: Callable[[], Tensor]) -> None:
        self._task = task
        self._weight = weight

    def __getattr__(self, name: str) -> object:
        return getattr(self._task, name)

    @property
    def param_weight(self) -> Tensor:
        return self._weight()


def has_adapters(module: Megatron) -> bool:
    """Whether a module holds matrices of experts with adapters."""
    return isinstance(getattr(module, "adapter", None), ExpertAdapter)


def merged_tasks(tasks: list[Megatron]) -> list[Megatron]:
    """Returns Bridge's conversion `tasks`, changed to export experts with their adapters merged."""

    def merged(task: Megatron) -> Tensor:
        adapter: ExpertAdapter = task.megatron_module.adapter
        first, second = adapter.factors(task)
        weight: Tensor = task.param_weight.detach()
        change: Tensor = adapter.scale * (second.float() @ first.float())
        return (weight.float() + change).to(weight.dtype)

    return [
        _Changed(t, partial(merged, t)) if has_adapters(t.megatron_module) else t for t in tasks
    ]


def factor_tasks(tasks: list[Megatron], factor: str, modules: Sequence[str]) -> list[Megatron]:
    """Returns conversion tasks of Bridge that export one factor, under the names of the matrices.

    `factor` is lora_A or lora_B. Only matrices whose names contain one of `modules` have adapters,
    on any pipeline stage. `tasks` must be new: Bridge caches the shapes that a task has exported.
    """

    def own(task: Megatron) -> Tensor:
        # Bridge's mapping of the matrix joins the parts of all ranks along the dimension in which
        # the matrix is split. So a factor that every rank has whole is cut first, and is contiguous
        # as NCCL needs it. A matrix split by rows fuses the gate and up projections, so lora_A is
        # repeated for both.
        adapter: ExpertAdapter = task.megatron_module.adapter
        first, second = adapter.factors(task)
        group = adapter.first.groups.expt_tp
        by_rows = adapter.first.partition_dim == 0
        is_first = factor == "lora_A"
        part = first if is_first else second
        if is_first == by_rows:
            part = part.chunk(group.size(), dim=0 if by_rows else 1)[group.rank()].contiguous()
        return torch.cat([part, part]) if is_first and by_rows else part

    adapted_tasks = [
        task for task in tasks if any(name in task.global_param_name for name in modules)
    ]
    return [
        _Changed(t, partial(own, t)) if has_adapters(t.megatron_module) else t
        for t in adapted_tasks
    ]
