"""The policy: a trained model whose weights are published, and its low-rank adapters.

With adapters, which are Megatron-Bridge's, only these are trained. Each adapted matrix is W + alpha
/ rank * B A. Source: LoRA (arXiv:2106.09685).

There may be several adapters, each with its own optimizer state; only one is in the model. A
training step, the publish of an adapter and a save work on the active adapter. So each is trained
exactly as if it were the only one, in every layout: the model holds nothing of the others.

In a client's own loop each is a model of a client: it has a rank and an alpha of its own, and
servers get its values of its newest publish, not its newest ones. All have the shapes of the
largest rank; what is beyond an adapter's rank is 0, gets gradients of 0, and so stays 0.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from slipstream.core.errors import UntrainableBatch
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import matrices_named
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.model.logprobs import defer_projections
from slipstream.learner.trainer.model.model import (
    Change,
    MemoryPart,
    TrainedModel,
    parameters,
    torch_optimizers,
    unwrapped,
)
from slipstream.learner.trainer.model.model_part import LayerBeside
from slipstream.learner.trainer.ranks.parallel import Ranks
from torch import Tensor

# Name of the vision tower in a chunk.
TOWER = "visual"


@dataclass(frozen=True)
class Policy(TrainedModel):
    """The trained model whose weights are published to the rollout servers."""

    adapters: "NamedAdapters" = field(kw_only=True)
    # A layer that drafts on the servers; None if no extension has one.
    drafts: LayerBeside | None = field(kw_only=True, default=None)


def adapters(config: Config, ranks: Ranks) -> Change:
    """Returns the change that adds adapters to the decoder's matrices that `config.lora` names.

    All other parameters are frozen, including a vision tower's. New adapters have no effect (B is
    0), and their values are the same in every layout.
    """

    def as_wrapped(state: dict[str, object], prefix: str, *_: object) -> None:
        # Checkpoints have the wrapped matrix's own name.
        for name in [name for name in state if name.startswith(prefix)]:
            rest = name.removeprefix(prefix)
            if not rest.startswith(("adapter.", "to_wrap.")):
                state[f"{prefix}to_wrap.{rest}"] = state.pop(name)

    def change(chunks: list[Megatron]) -> list[Megatron]:
        from megatron.bridge.peft.lora import LoRA
        from slipstream.learner.trainer.layers.expert_adapters import ExpertAdapter
        from slipstream.learner.trainer.layers.experts import GroupedLinear

        class DecoderAdapters(LoRA):  # type: ignore[misc]
            """LoRA of the decoder only: one adapter for each expert, none for the vision tower."""

            def transform(
                self,
                module: Megatron,
                name: str | None = None,
                prefix: str | None = None,
            ) -> Megatron:
                if (prefix or "").partition(".")[0] == TOWER:
                    # Matrices of a tower may have the decoder's names.
                    return module
                if not isinstance(module, GroupedLinear):
                    return gathering_itself(super().transform(module, name, prefix))
                if self.match(module, name, prefix) is not None:
                    scale = self.alpha / self.dim
                    module.requires_grad_(False)
                    module.adapter = ExpertAdapter(module, rank=self.dim, scale=scale)
                return module

        lora = DecoderAdapters(
            target_modules=list(matrices_named(config.lora.modules)),
            dim=config.lora.rank,
            alpha=config.lora.alpha,
        )
        adapted: list[Megatron] = lora(defer_projections(chunks), training=True)
        for chunk in adapted:
            for _, _, module in _adapted(chunk):
                module._register_load_state_dict_pre_hook(as_wrapped)
            draw_first_adapters(chunk, ranks, seed=config.run.seed)
        return adapted

    return change


def gathering_itself(module: Megatron) -> Megatron:
    """Makes a module's adapter, if it has one, gather its own inputs under sequence parallelism.

    By default Bridge's adapter takes the inputs that TransformerEngine's fused norm has gathered.
    TransformerEngine 2.11.0 drops the gradient of these inputs, so layers below would get no
    gradient from the adapter. Returns `module`.
    """
    wrapped: Megatron = getattr(module, "to_wrap", None)
    if getattr(wrapped, "return_layernorm_output_gathered", False):
        wrapped.return_layernorm_output_gathered = False
        module.adapter.disable_sequence_parallel_comm = False
    return module


def draw_first_adapters(chunk: Megatron, ranks: Ranks, *, seed: int) -> None:
    """Draws all adapters of a model chunk, those of experts too, as at the start of a run."""
    from slipstream.learner.trainer.layers.expert_adapters import ExpertAdapter

    for layer in chunk.decoder.layers:
        for name, module in layer.named_modules():
            if isinstance(module, ExpertAdapter):
                module.initialise(name, layer.layer_number, seed=seed)
    draw_adapters(chunk, ranks, seed=seed)


@torch.no_grad()
def draw_adapters(
    chunk: Megatron,
    ranks: Ranks,
    *,
    seed: int,
    rank: int | None = None,
    targets: Collection[str] | None = None,
) -> None:
    """Draws A uniformly from -1 / sqrt(inputs) to 1 / sqrt(inputs), like PEFT, and sets B to 0.

    Megatron's own values would depend on the earlier layers of this pipeline stage. A is 0 beyond
    `rank`, and for matrices that `targets` do not name; its other values are those of adapters
    of this rank.
    """
    group = ranks.tp_group
    trained = None if targets is None else matrices_named(targets)
    for layer_number, name, module in _adapted(chunk):
        weight = module.adapter.linear_in.weight
        is_split_by_input = module.adapter.input_is_parallel
        rows, inputs = weight.shape
        if is_split_by_input:
            inputs *= group.size()
        else:
            rows *= group.size()
        draw = np.random.default_rng([seed, layer_number, zlib.crc32(name.encode())])
        factor = draw.uniform(-1.0, 1.0, (rows, inputs)) / np.sqrt(inputs)
        if rank is not None:
            factor[rank:] = 0.0
        if trained is not None and name.rpartition(".")[2] not in trained:
            factor[:] = 0.0
        part = torch.from_numpy(factor).chunk(group.size(), dim=int(is_split_by_input))
        weight.copy_(part[group.rank()])
        module.adapter.linear_out.weight.zero_()


def _adapted(chunk: Megatron) -> Iterator[tuple[int, str, Megatron]]:
    """Yields number of the layer, name in it and module of each adapted matrix, but of experts."""
    from megatron.bridge.peft.lora_layers import LoRALinear

    for layer in chunk.decoder.layers:
        for name, module in layer.named_modules():
            if isinstance(module, LoRALinear):
                yield layer.layer_number, name, module


@dataclass
class _Waiting:
    """The values of an adapter that is not in the model."""

    # The adapter's parameters, master weights and moments.
    values: list[Tensor]
    # The update count of each parameter group of the torch optimizers.
    counts: list[int]
    # The state of the loss's scaler; None if there is none.
    scale: dict[str, Any] | None


class NamedAdapters:
    """The adapters of a model, which all have the same shapes; the first one is in the model.

    `with adapters.active("math"): ...` replaces the first adapter by another. Every adapter starts
    with the same values. Without names there is one adapter, named "", or none.
    """

    def __init__(
        self,
        names: Sequence[str],
        model: TrainedModel,
        *,
        are_clients: bool,
    ) -> None:
        """Makes every adapter a copy of the adapter in `model`; collective for several names.

        The model's memory may move parameters and optimizer state of the active adapter to the
        host; it does not move the other adapters' tensors. With `are_clients` servers get what
        `serve` has kept.
        """
        self._model = model
        self.names = tuple(names) or ("",)
        self.have_names = self.names != ("",)
        self.are_several = len(self.names) > 1
        # Whether servers get what clients have published, in place of the newest values.
        self.are_clients = are_clients
        self._active = self.names[0]
        self._waiting: dict[str, _Waiting] = {}
        self._served: dict[str, list[Tensor]] = {}
        # Rank and alpha of those adapters that clients have used, by name.
        self.sizes: dict[str, tuple[int, float]] = {}
        # Clients' adapters whose values have changed since they were told.
        self.changed = set(self.names) if are_clients else set()
        if self.are_several or are_clients:
            # An untrained adapter is saved too, with moments of zeros.
            for part in model.optimizer.chained_optimizers:
                if not part.is_stub_optimizer:
                    part.init_state_fn(part.optimizer, part.config)
            for group in self._groups():
                group.setdefault("step", 0)
            for name in self.names[1:]:
                self._waiting[name] = _Waiting(
                    [tensor.detach().clone() for tensor in self._tensors()],
                    [group["step"] for group in self._groups()],
                    None if model.scaler is None else model.scaler.state_dict(),
                )
        if are_clients:
            for name in self.names:
                self._served[name] = [torch.zeros_like(tensor) for _, tensor in self._trained()]

    @contextmanager
    def active(self, name: str) -> Iterator[None]:
        """Activates adapter `name` and its optimizer state in the model inside the context.

        Collective, because a deferred all-gather of the parameters is completed before a change of
        adapter.
        """
        before = self._active
        self._put_in(name)
        try:
            yield
        finally:
            self._put_in(before)

    @contextmanager
    def in_use(
        self,
        name: str,
        *,
        rank: int,
        alpha: float,
    ) -> Iterator[None]:
        """Activates adapter `name` with the factor alpha / rank inside the context; collective."""
        self.sizes[name] = rank, alpha
        with self.active(name), self._scaled(rank, alpha):
            yield

    @contextmanager
    def published(self, name: str) -> Iterator[None]:
        """Puts what servers get of adapter `name` into the model inside the context; collective.

        Clients' adapters come without their optimizer state, and their factor is 1.
        """
        if not self.are_clients:
            with self.active(name):
                yield
            return
        with self._model.memory.resident(MemoryPart.PARAMETERS), self._scaled(1, 1.0):
            self._model.gather_parameters()
            trained = [tensor for _, tensor in self._trained()]
            exchange(trained, self._served[name])
            try:
                yield
            finally:
                exchange(trained, self._served[name])

    @torch.no_grad()
    def serve(self, count: Callable[[Tensor], Tensor], *, scale: float) -> None:
        """Makes the values of the active adapter those that servers get, times `scale`; collective.

        `count` sums over the ranks. Raises UntrainableBatch if values are not finite.
        """
        self._model.gather_parameters()
        trained = self._trained()
        faulty = sum((~torch.isfinite(tensor)).sum().cpu() for _, tensor in trained)
        if number := int(count(torch.as_tensor(float(faulty)))):
            raise UntrainableBatch(f"the adapter has {number} values that are not finite")
        for (name, tensor), served in zip(trained, self._served[self._active], strict=True):
            # The second factor of each product has its scale.
            served.copy_(tensor * scale if ".linear_out." in name else tensor)

    @contextmanager
    def _scaled(self, rank: int, alpha: float) -> Iterator[None]:
        """Sets the factor of the adapter's product inside the context."""
        chunks = map(unwrapped, self._model.chunks)
        adapters = [module.adapter for chunk in chunks for _, _, module in _adapted(chunk)]
        before = [(adapter.dim, adapter.alpha) for adapter in adapters]
        for adapter in adapters:
            adapter.dim = rank
            adapter.alpha = alpha
        try:
            yield
        finally:
            for adapter, (dim, own_alpha) in zip(adapters, before, strict=True):
                adapter.dim = dim
                adapter.alpha = own_alpha

    @torch.no_grad()
    def _put_in(self, name: str) -> None:
        if name == self._active:
            return
        with self._model.memory.resident(MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER):
            self._model.gather_parameters()
            other = self._waiting.pop(name)
            exchange(self._tensors(), other.values)
            for place, group in enumerate(self._groups()):
                own_count = group["step"]
                group["step"] = other.counts[place]
                other.counts[place] = own_count
            if other.scale is not None:
                scale = self._model.scaler.state_dict()
                self._model.scaler.load_state_dict(other.scale)
                other.scale = scale
            self._waiting[self._active] = other
            self._active = name

    def _trained(self) -> list[tuple[str, Tensor]]:
        parameters = (pair for chunk in self._model.chunks for pair in chunk.named_parameters())
        return [(name, tensor) for name, tensor in parameters if tensor.requires_grad]

    def _tensors(self) -> list[Tensor]:
        trained = [tensor for _, tensor in self._trained()]
        return [*trained, *optimizer_state(self._model.optimizer, self._model.chunks)]

    def _groups(self) -> list[dict[str, Any]]:
        parts = torch_optimizers(self._model.optimizer)
        return [group for part in parts for group in part.param_groups]


def optimizer_state(optimizer: Megatron, chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Yields the optimizer's master weights and moments, but no model parameters."""
    theirs = {tensor.untyped_storage().data_ptr() for tensor in parameters(chunks)}
    for part in torch_optimizers(optimizer):
        for group in part.param_groups:
            yield from (p for p in group["params"] if p.untyped_storage().data_ptr() not in theirs)
        for state in part.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


@torch.no_grad()
def exchange(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Gives each tensor the value of its partner, on any device, and the partner its own."""
    for tensor, value in zip(tensors, values, strict=True):
        before = tensor.clone()
        tensor.copy_(value)
        value.copy_(before)
