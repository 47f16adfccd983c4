"""The layer that drafts, in the trainer: its values, its updates and what it computes.

A drafted token is followed by another, for which the policy's state is not known yet: the layer's
own output stands in its place. So each row is computed as the first, second, ... token of a draft,
and attends to what it will find in the engine's cache then. Source: EAGLE-3 (arXiv:2503.01840).
"""

import math
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from slipstream.core.settings.config import Config
from slipstream.extensions.drafts.extension import PREFIX
from slipstream.extensions.drafts.shape import DraftShape, begun
from slipstream.learner.trainer.model.model_part import LayerBeside, ModelPart
from torch import Tensor

_BETAS = (0.9, 0.95)
_EPS = 1e-8
_MAX_NORM = 1.0


class DraftLayer(LayerBeside):
    """The layer's values, with Adam's moments, in float32; the same on all ranks."""

    def __init__(
        self,
        shape: DraftShape,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.shape = shape
        self._shapes = dict(shape.tensors())
        self._sizes = [math.prod(size) for size in self._shapes.values()]
        values = torch.empty(sum(self._sizes))
        random = torch.Generator().manual_seed(seed)
        for name, part in self.named(values).items():
            if part.dim() == 1:
                part.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                # Attention and MLP add nothing yet: outputs would grow along a draft.
                part.zero_()
            else:
                part.normal_(0.0, 0.02, generator=random)
        self.values = torch.nn.Parameter(values.to(device))
        self.moments: Tensor
        self.updates: Tensor
        self.register_buffer("moments", torch.zeros(2, len(values), device=device))
        self.register_buffer("updates", torch.zeros(1, device=device))

    def named(self, values: Tensor | None = None) -> dict[str, Tensor]:
        """Returns views of the values, or of a tensor like them, by the names of the tensors."""
        values_or_own = self.values.detach() if values is None else values
        parts: tuple[Tensor, ...] = torch.split(values_or_own, self._sizes)
        shapes = self._shapes.items()
        return {name: part.view(size) for (name, size), part in zip(shapes, parts, strict=True)}

    @classmethod
    def beside(
        cls,
        config: Config,
        device: torch.device,
        *,
        load_weights: bool,
    ) -> Self:
        """Returns a layer beside the policy of `config`, the same on all ranks.

        It begins as in the model's folder, if that has one and is to be loaded. Raises ConfigError
        for the layer of another model.
        """
        shape, folder = begun(config)
        layer = cls(shape, seed=config.run.seed, device=device)
        tensors = layer.named()
        for path in folder.glob("*.safetensors") if load_weights and folder else ():
            for name, value in load_file(path).items():
                tensors[name].copy_(value)
        return layer

    def write_folder(self, folder: Path, dtype: str) -> None:
        """Writes the config.json of the layer into a new `folder`."""
        self.shape.write_folder(folder, dtype)

    def published(self) -> dict[str, Tensor]:
        """Returns views of the values by their names among the published weights."""
        return {f"{PREFIX}{name}": value for name, value in self.named().items()}

    @torch.no_grad()
    def update(self, gradient: Tensor, learning_rate: float) -> bool:
        """Makes a step of Adam with `gradient`, whose norm is bounded first.

        Returns False for a gradient that is not finite, which changes nothing.
        """
        norm = gradient.norm()
        if not torch.isfinite(norm):
            return False
        gradient = gradient * (_MAX_NORM / norm.clamp(min=_MAX_NORM))
        self.updates += 1
        first, second = self.moments
        first.lerp_(gradient, 1 - _BETAS[0])
        second.lerp_(gradient.square(), 1 - _BETAS[1])
        corrections = [1 - beta**self.updates for beta in _BETAS]
        scale = (second / corrections[1]).sqrt_().add_(_EPS)
        self.values.sub_(learning_rate * (first / corrections[0]) / scale)
        return True


class DraftPart(ModelPart):
    """Opens the layer beside the policy."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def layer(self, device: torch.device, *, load_weights: bool) -> DraftLayer:
        return DraftLayer.beside(self._config, device, load_weights=load_weights)


def draft_states(
    weights: dict[str, Tensor],
    shape: DraftShape,
    embedded: Tensor,
    hidden: Tensor,
    depth: int,
) -> list[Tensor]:
    """Returns the layer's outputs as the first, second, ... token of a draft, `depth` tensors.

    `embedded` and `hidden` are [windows, rows, hidden size]: the embedding of token i + 1 and the
    policy's state at token i. Row i of output d, counted from 0, stands for the policy's state at
    token i + 1 in a draft that began d tokens earlier; its first d rows mean nothing.
    """
    rows = embedded.shape[1]
    scale = shape.head_dim**-0.5
    own_weights = {name.removeprefix("layers.0."): weight for name, weight in weights.items()}
    places = torch.arange(rows, device=embedded.device)
    wide = torch.promote_types(embedded.dtype, torch.float32)
    exponents = torch.arange(
        0,
        shape.head_dim,
        2,
        device=embedded.device,
        dtype=wide,
    )
    angles = places[:, None] * shape.rope_theta ** (-exponents / shape.head_dim)
    cos, sin = (part.repeat(1, 2).to(embedded.dtype) for part in (angles.cos(), angles.sin()))

    def heads(states: Tensor, name: str, *, rotated: bool = True) -> Tensor:
        projected: Tensor = F.linear(states, own_weights[f"self_attn.{name}.weight"])
        projected = projected.view(*states.shape[:2], -1, shape.head_dim).transpose(1, 2)
        if not rotated:
            return projected
        first, second = projected.chunk(2, dim=-1)
        return projected * cos + torch.cat([-second, first], dim=-1) * sin

    outputs: list[Tensor] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for number in range(depth):
        states = F.linear(torch.cat([embedded, hidden], dim=-1), own_weights["fc.weight"])
        groups = shape.num_attention_heads // shape.num_key_value_heads
        query = heads(states, "q_proj")
        keys.append(heads(states, "k_proj").repeat_interleave(groups, dim=1))
        values.append(heads(states, "v_proj", rotated=False).repeat_interleave(groups, dim=1))
        # The cache has rows of the policy's own states up to the draft's first token, and behind
        # these one row of each token of the draft.
        seen = places[None] <= places[:, None] - number
        scores = (query @ keys[0].transpose(-1, -2)).masked_fill(~seen, -math.inf)
        drafted = [
            (query * key.roll(number - place, dims=2)).sum(-1, keepdim=True)
            for place, key in enumerate(keys[1:], 1)
        ]
        shares = torch.cat([scores, *drafted], dim=-1).to(wide).mul(scale)
        shares = shares.softmax(-1).to(query.dtype)
        mixed = shares[..., :rows] @ values[0]
        for place, value in enumerate(values[1:], 1):
            share = shares[..., rows + place - 1 : rows + place]
            mixed = mixed + share * value.roll(number - place, dims=2)
        attended = mixed.transpose(1, 2).flatten(2)
        states = states + F.linear(attended, own_weights["self_attn.o_proj.weight"])
        norm = own_weights["post_attention_layernorm.weight"]
        normed = F.rms_norm(
            states,
            states.shape[-1:],
            norm,
            shape.rms_norm_eps,
        )
        gate, up, down = (own_weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        states = states + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)
        outputs.append(states)
        # The output at a row stands in place of the policy's state at the next one.
        hidden = states.roll(1, dims=1)
    return outputs
