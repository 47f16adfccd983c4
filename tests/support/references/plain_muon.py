"""Muon in float64, by arXiv:2502.16982 and Keller Jordan's "Muon" (2024), on transformers' models.

As in Megatron, a matrix is what one multiplication takes: gate and up projection are one, queries,
keys and values are three.
"""

import torch
from torch import Tensor

# Matrices that Megatron multiplies at once.
_TOGETHER = (("gate_proj", "up_proj"), ("in_proj_qkvz", "in_proj_ba"))
_ATTENTION = ("q_proj", "k_proj", "v_proj")
# The first five steps of the "quintic" iteration, and the one step of the paper.
COEFFICIENTS = {
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    "simple": [(3.4445, -4.7750, 2.0315)],
}
# Rows of a parameter, or the matrix of one expert.
Part = tuple[torch.nn.Parameter, Tensor]


class PlainMuon:
    """Updates the matrices of a model; embeddings, output layer and vectors stay as they are."""

    def __init__(self, model: torch.nn.Module, settings: dict) -> None:
        self._settings = settings
        self.matrices = list(
            matrices(model, split_qkv=settings.get("muon_split_qkv", True))
        )
        self._momenta = [torch.zeros(()).double() for _ in self.matrices]

    def step(self, rate: float, weight_decay: float) -> None:
        get = self._settings.get
        share = get("muon_momentum", 0.95)
        kind = get("muon_coefficient_type", "quintic")
        for place, parts in enumerate(self.matrices):
            gradient = torch.cat(
                [parameter.grad[rows] for parameter, rows in parts]
            ).double()
            momentum = share * self._momenta[place] + (1 - share) * gradient
            self._momenta[place] = momentum
            if get("muon_nesterov", False):
                momentum = share * momentum + (1 - share) * gradient
            update = orthogonal(
                momentum, COEFFICIENTS[kind], get("muon_num_ns_steps", 5)
            )
            update *= get("muon_extra_scale_factor", 0.2)
            outputs, inputs = update.shape
            if get("muon_scale_mode", "spectral") == "spectral":
                update *= max(outputs, inputs) ** 0.5
            else:
                update *= (outputs / inputs) ** 0.5
            sizes = [len(parameter.grad[rows]) for parameter, rows in parts]
            for (parameter, rows), change in zip(
                parts, update.split(sizes), strict=True
            ):
                old = parameter.data[rows].double()
                parameter.data[rows] = (
                    old - rate * (weight_decay * old + change)
                ).float()


def orthogonal(matrix: Tensor, coefficients: list, steps: int) -> Tensor:
    """Singular vectors of `matrix` with singular values near 1, by Newton-Schulz iterations."""
    x = matrix / matrix.norm()
    for step in range(steps):
        a, b, c = coefficients[step % len(coefficients)]
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def matrices(model: torch.nn.Module, *, split_qkv: bool) -> list[list[Part]]:
    """What is made orthogonal: parts that are one matrix together."""
    together = _TOGETHER if split_qkv else (*_TOGETHER, _ATTENTION)
    matrices: list[list[Part]] = []
    for module in model.modules():
        layers = {
            name: layer
            for name, layer in module.named_children()
            if isinstance(layer, torch.nn.Linear) and name != "lm_head"
        }
        matrices += [
            [whole(layers.pop(name).weight) for name in names]
            for names in together
            if names[0] in layers
        ]
        for name, layer in layers.items():
            heads = 2 * model.config.num_attention_heads
            if name == "q_proj" and len(layer.weight) == heads * model.config.head_dim:
                # Every head's queries, then its gate.
                rows = torch.arange(len(layer.weight)).view(
                    -1, 2, model.config.head_dim
                )
                matrices += [
                    [(layer.weight, rows[:, kind].flatten())] for kind in (0, 1)
                ]
            else:
                matrices.append([whole(layer.weight)])
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 3 and hasattr(module, "gate_up_proj"):
                matrices += [
                    [(parameter, torch.tensor(expert))]
                    for expert in range(len(parameter))
                ]
            elif parameter.dim() == 2 and hasattr(module, "top_k"):
                matrices.append([whole(parameter)])
    return matrices


def whole(parameter: torch.nn.Parameter) -> Part:
    return parameter, torch.arange(len(parameter))
