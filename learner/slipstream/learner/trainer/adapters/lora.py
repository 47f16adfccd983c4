"""Low-rank adapters of Megatron-Bridge on a loaded model; only the adapters are trained.

Each adapted matrix is W + alpha / rank * B A. Source: LoRA (arXiv:2106.09685).
"""

import zlib
from collections.abc import Collection, Iterator

import numpy as np
import torch
from slipstream.core.settings.config import Config
from slipstream.core.settings.lora_section import LATENT
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.model.model import Change, defer_projections
from slipstream.learner.trainer.ranks.parallel import Ranks

# Name of the vision tower in a chunk.
TOWER = "visual"


def adapters(config: Config, ranks: Ranks) -> Change:
    """Returns the change that adds adapters to the decoder's matrices that `config.lora` names.

    All other parameters are frozen, including a vision tower's. New adapters have no effect (B is
    0), and their values are the same in every layout.
    """

    def change(chunks: list[Megatron]) -> list[Megatron]:
        from megatron.bridge.peft.lora import LoRA
        from slipstream.learner.trainer.adapters.expert_adapters import ExpertAdapter
        from slipstream.learner.trainer.layers.experts import GroupedLinear

        class DecoderAdapters(LoRA):  # type: ignore[misc]
            """LoRA of the decoder only: one adapter for each expert, none for the vision tower."""

            def transform(
                self, module: Megatron, name: str | None = None, prefix: str | None = None
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

        matrices = list(config.lora.modules)
        if "linear_qkv" in matrices:
            # A layer has either linear_qkv or some of these matrices.
            matrices += [*LATENT, "in_proj"]
        if "linear_proj" in matrices:
            matrices.append("out_proj")
        lora = DecoderAdapters(
            target_modules=matrices, dim=config.lora.rank, alpha=config.lora.alpha
        )
        adapted: list[Megatron] = lora(defer_projections(chunks), training=True)
        for chunk in adapted:
            _initialise(chunk, ranks, seed=config.run.seed)
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


def _initialise(chunk: Megatron, ranks: Ranks, *, seed: int) -> None:
    """Draws the values of new adapters, and makes the chunk load and save them by their names."""
    from slipstream.learner.trainer.adapters.expert_adapters import ExpertAdapter

    for layer in chunk.decoder.layers:
        for name, module in layer.named_modules():
            if isinstance(module, ExpertAdapter):
                module.initialise(name, layer.layer_number, seed=seed)
    for _, name, module in _adapted(chunk):
        module._register_load_state_dict_pre_hook(_as_wrapped)
        if name.endswith("in_proj"):
            # With the name in_proj Bridge would split the rows for checkpoints as for Mamba.
            module.adapter.base_linear_name = "delta_net"
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
    `rank`, and for matrices that are not among `targets`; its other values are those of adapters
    of this rank.
    """
    for layer_number, name, module in _adapted(chunk):
        weight = module.adapter.linear_in.weight
        is_split_by_input = module.adapter.input_is_parallel
        rows, inputs = weight.shape
        if is_split_by_input:
            inputs *= ranks.tp_size
        else:
            rows *= ranks.tp_size
        draw = np.random.default_rng([seed, layer_number, zlib.crc32(name.encode())])
        whole = draw.uniform(-1.0, 1.0, (rows, inputs)) / np.sqrt(inputs)
        if rank is not None:
            whole[rank:] = 0.0
        if targets is not None and name.rpartition(".")[2] not in targets:
            whole[:] = 0.0
        part = torch.from_numpy(whole).chunk(ranks.tp_size, dim=int(is_split_by_input))
        weight.copy_(part[ranks.tp_group.rank()])
        module.adapter.linear_out.weight.zero_()


def _adapted(chunk: Megatron) -> Iterator[tuple[int, str, Megatron]]:
    """Yields number of the layer, name in it and module of each adapted matrix, but of experts."""
    from megatron.bridge.peft.lora_layers import LoRALinear

    for layer in chunk.decoder.layers:
        for name, module in layer.named_modules():
            if isinstance(module, LoRALinear):
                yield layer.layer_number, name, module


def _as_wrapped(state: dict[str, object], prefix: str, *_: object) -> None:
    """Renames a wrapped matrix's state before loading; checkpoints have the matrix's own name."""
    for name in [name for name in state if name.startswith(prefix)]:
        rest = name.removeprefix(prefix)
        if not rest.startswith(("adapter.", "to_wrap.")):
            state[f"{prefix}to_wrap.{rest}"] = state.pop(name)
