"""Proofs of a loss or a weight over layouts, ratios and repeated calls.

A property that fails gives one line with a small example. Layouts are compared in float64, extreme
values are tried in float32.

Values that a loss detaches by `detach`, `no_grad`, `item` or the sums of sequences are held
constant when its gradient is compared with finite differences. So CISPO, GSPO and REINFORCE pass,
and a custom backward pass must be right. A loss fails if it changes with the log-probabilities of
tokens whose advantages have one sign, but none of these tokens has a gradient.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import TypeAlias

import numpy as np
import torch
from slipstream.core.errors import RunFailed
from slipstream.extensions.proofs.proof import Disproved, check_state, faults, implementation
from slipstream.extensions.proofs.scenes import LONG, SEQUENCES, Inputs, Layout, Scene
from slipstream.learner.algorithms.functions import Function
from slipstream.learner.algorithms.inputs import LossInputs, SequenceSums
from slipstream.learner.algorithms.token_functions import token_terms, token_weights
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Log ratios to the proximal and the behavior policy, advantage and entropy of a token.
Case: TypeAlias = tuple[float, float, float, float]
# Logarithms of ratios from 1e-20 to 1e20.
LOG_RATIOS = (0.0, 0.3, -0.3, 5.0, -5.0, 20.0, -20.0, 46.05, -46.05)
# The most numbers of a function that are tried as bounds, and the offsets of the float32 neighbours
# of each bound.
MOST = 250
NEIGHBOURS = np.arange(-4, 5, dtype=np.float32)
# Steps of finite differences with their tolerance: a function may compute in float32.
STEPS = ((1e-5, 1e-4), (1e-3, 1e-2))
# The code in which a custom autograd Function computes, and the file of sums over sequences.
_APPLY: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_SUMS = SequenceSums.sums.__code__.co_filename


@dataclass(frozen=True)
class TokenProof:
    """The proof of a loss or a weight."""

    function: Function
    has_reference: bool = False

    def faults(self) -> list[str]:
        """Returns one line for each required property that the function lacks."""
        properties: dict[str, Callable[[], None]] = {
            "result": self._check_result,
            "state": self._check_state,
            "masked tokens": self._check_masked,
            "layout": self._check_layouts,
            "empty mask": self._check_empty,
            "finite": self._check_finite,
        }
        if self.function.kind == "loss":
            properties |= {"gradient": self._check_gradient, "entropy": self._check_entropy}
        return faults(self.function, properties)

    def held_constant(self) -> list[str]:
        """Returns the lines of code ("file:line") where a loss detaches a number."""
        found: dict[str, None] = {}
        for scene in self._small():
            with _HeldConstant() as held:
                self._result(scene.inputs().tokens, scene)
            found |= held.lines
        return list(found)

    def _small(self) -> list[Scene]:
        return [Scene(sequences, self.has_reference) for sequences in SEQUENCES]

    def _scenes(self) -> list[Scene]:
        """Returns small scenes, then scenes of policies far apart, then that of a long sequence."""
        small = self._small()
        far = [replace(small[-1], spread=spread) for spread in (1.0, 3.0)]
        return [*small, *far, Scene(LONG, self.has_reference, spread=3.0)]

    def _result(self, tokens: LossInputs, scene: Scene) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the losses or weights, and the reports."""
        if self.function.kind == "loss":
            terms = token_terms(self.function, tokens, str(scene))
            return terms.losses, terms.reports
        weights = token_weights(self.function, tokens, str(scene))
        return weights.weights, weights.reports

    def _sum(self, inputs: Inputs, scene: Scene) -> Tensor:
        values, _ = self._result(inputs.tokens, scene)
        return _summed(values, inputs)

    def _computed(self, scene: Scene, inputs: Inputs) -> dict[str, Tensor]:
        """Returns the function's values, gradient and reports by name, each float64 [tokens]."""
        values, reports = self._result(inputs.tokens, scene)
        gradient = _gradient(_summed(values, inputs), inputs.leaf)
        found = {str(self.function.kind): values, "gradient": gradient}
        found |= {f"report {name}": one for name, one in reports.items()}
        return {name: one.detach().double() for name, one in found.items()}

    def _check_result(self) -> None:
        for scene in self._scenes():
            single = replace(scene, dtype=torch.float32)
            tokens = single.inputs().tokens
            self._result(tokens, single)
            _check_untouched(tokens, single.inputs().tokens)

    def _check_state(self) -> None:
        def compute(scene: Scene) -> dict[str, Tensor]:
            trained = scene.mask
            found = self._computed(scene, scene.inputs())
            return {name: torch.where(trained, values, 0) for name, values in found.items()}

        check_state(self._scenes(), compute, functools.partial(_difference, exactly=True))

    def _check_masked(self) -> None:
        for scene in self._scenes():
            mask, chance = scene.mask, np.random.default_rng(5)
            limits = {name: (-60.0, 0.0) for name in scene.fields if name.endswith("logprobs")}
            limits |= {"advantages": (-9, 9), "entropy": (3, 6), "lags": (8, 9), "versions": (1, 2)}
            changed = {}
            for name, (low, high) in limits.items():
                field = scene.fields[name]
                other = torch.from_numpy(chance.uniform(low, high, len(mask)))
                changed[name] = torch.where(mask, field, other.to(field.dtype))
            before = self._computed(scene, scene.inputs())
            after = self._computed(scene, scene.inputs(changed=changed))
            if difference := _difference(before, after, mask, exactly=True):
                raise Disproved(f"{difference}, with other values at masked tokens: {scene}")
            for place in torch.nonzero((after["gradient"] != 0) & ~mask)[:1, 0].tolist():
                gradient = after["gradient"][place]
                raise Disproved(f"masked token {place} has the gradient {gradient:.6g}: {scene}")

    def _check_layouts(self) -> None:
        found: dict[str, str] = {}
        for scene in self._scenes():
            (_, first), *others = scene.layouts().items()
            whole = scene.values(first, functools.partial(self._computed, scene))
            for title, layout in others:
                if title not in found and (fault := self._layout_fault(scene, layout, whole)):
                    found[title] = f"{title}: {fault}: {scene}"
        if found:
            fault, *_ = found.values()
            also = f"; also with {', '.join([*found][1:])}" if len(found) > 1 else ""
            raise Disproved(f"{fault}{also}")

    def _layout_fault(self, scene: Scene, layout: Layout, whole: Mapping[str, Tensor]) -> str:
        try:
            found = scene.values(layout, functools.partial(self._computed, scene))
        except RunFailed as fault:
            return str(fault)
        return _difference(whole, found, scene.mask)

    def _check_empty(self) -> None:
        for sequences in ((".",), ("..", "...")):
            scene = Scene(sequences, self.has_reference, dtype=torch.float32)
            if not self._computed(scene, scene.inputs())["gradient"].isfinite().all():
                raise Disproved(
                    f"the gradient is not finite: {len(scene.mask)} tokens, none trained"
                )

    def _check_finite(self) -> None:
        ratios = itertools.product(LOG_RATIOS, LOG_RATIOS, (1.0, -1.0, 0.0), (1.0, 0.0))
        cases = sorted(ratios, key=lambda case: abs(case[0]) + abs(case[1]))
        bounds = {0.0}
        for one in _constants(self.function):
            bounds |= {one, -one} | {math.log(x) for x in (one, 1 + one, 1 - one) if x > 0}
        near = np.array(sorted(b for b in bounds if abs(b) <= max(LOG_RATIOS)), dtype=np.float32)
        # Logarithms of ratios are rounded: a neighbour in float32 meets the bound itself.
        exact = near[:, None] + np.spacing(near)[:, None] * NEIGHBOURS
        rows = [
            [(one, one, sign, 1.0) for one in row] for row in exact.tolist() for sign in (1.0, -1.0)
        ]
        self._check_cases([[case] for case in cases])
        self._check_cases([[case] for row in rows for case in row])
        # In sequences of equal tokens sums are large, and deviations are 0 up to rounding.
        self._check_cases([*([case] * len(NEIGHBOURS) for case in cases), *rows])

    def _check_cases(self, sequences: Sequence[Sequence[Case]]) -> None:
        """Raises Disproved if a value is not finite at a case, or if an input is changed."""
        cases = [case for sequence in sequences for case in sequence]
        numbers = torch.tensor(cases, dtype=torch.float32).unbind(1)
        to_proximal, to_behavior, advantages, entropy = numbers
        # The largest of the three is 0, so that a difference is exact.
        logprobs = -torch.stack([-to_proximal, -to_behavior, torch.zeros(len(cases))]).amax(0)
        shown = tuple("x" * len(sequence) for sequence in sequences)
        scene = Scene(shown, self.has_reference, dtype=torch.float32)
        changed = {
            "logprobs": logprobs,
            "proximal_logprobs": logprobs - to_proximal,
            "behavior_logprobs": logprobs - to_behavior,
            "reference_logprobs": logprobs - to_behavior,
            "advantages": advantages,
            "entropy": entropy,
        }
        inputs = scene.inputs(changed=changed)
        found = self._computed(scene, inputs)
        _check_untouched(inputs.tokens, scene.inputs(changed=changed).tokens)
        for name, values in found.items():
            for place in torch.nonzero(~values.isfinite())[:1, 0].tolist():
                first, second, advantage, other = cases[place]
                length = len(shown[int(scene.ids[place])])
                inside = f", in a sequence of {length}" if length > 1 else ""
                raise Disproved(
                    f"{name} is {values[place]:g} at log ratio {first:.7g} to the proximal and "
                    f"{second:.7g} to the behavior policy, advantage {advantage:g}, "
                    f"entropy {other:g}{inside}"
                )

    def _check_gradient(self) -> None:
        # By sign of the advantage: whether a token has a gradient, and an example of a token that
        # changes the loss.
        has_gradient = {1: False, -1: False}
        moves: dict[int, str] = {}
        for scene in [*self._small(), *(replace(one, spread=0.0) for one in self._small())]:
            inputs = scene.inputs()
            with _HeldConstant() as held:
                total = self._sum(inputs, scene)
            gradient = _gradient(total, inputs.leaf).tolist()
            moved = functools.partial(self._moved, scene)
            middle = float(total.detach())
            for place in torch.nonzero(scene.mask)[:, 0].tolist():
                slope, found = gradient[place], []
                for step, tolerance in STEPS:
                    after = (moved(place, step, held.recorded) - middle) / step
                    before = (middle - moved(place, -step, held.recorded)) / step
                    # At a kink any slope between the slopes of both sides is right.
                    found.append((after + before) / 2)
                    allowed = abs(after - before) / 2 + tolerance * (1 + abs(slope))
                    if abs(slope - found[-1]) <= allowed:
                        break
                else:
                    raise Disproved(
                        f"that of token {place} is {slope:.6g}, but {found[0]:.6g} by finite "
                        f"differences: {scene}"
                    )
                sign = 1 if scene.fields["advantages"][place] > 0 else -1
                has_gradient[sign] |= abs(slope) > 1e-9
                step = STEPS[1][0]
                free = (moved(place, step, None) - moved(place, -step, None)) / (2 * step)
                if abs(free) > 1e-6:
                    moves.setdefault(sign, f"{free:.4g} for each unit of token {place}: {scene}")
        for sign, example in moves.items():
            if not has_gradient[sign]:
                raise Disproved(
                    f"no token with a {'positive' if sign > 0 else 'negative'} advantage has one, "
                    f"but the loss moves by {example}; taken out at "
                    f"{', '.join(self.held_constant())}"
                )

    def _moved(
        self, scene: Scene, place: int, step: float, recorded: Sequence[object] | None
    ) -> float:
        """Returns the sum of the results with `step` added to the log-probability at `place`.

        `recorded` has detached values to use again, so that they stay constant. If it is None, the
        function recomputes them.
        """
        logprobs = scene.fields["logprobs"].clone()
        logprobs[place] += step
        inputs = scene.inputs(changed={"logprobs": logprobs})
        with nullcontext() if recorded is None else _HeldConstant(recorded):
            found = self._sum(inputs, scene)
        return float(found.detach())

    def _check_entropy(self) -> None:
        example = ""
        for scene in self._small():
            larger = {"entropy": scene.fields["entropy"] + 0.1}
            before = self._computed(scene, scene.inputs())
            after = self._computed(scene, scene.inputs(changed=larger))
            if _difference({"gradient": before["gradient"]}, after, scene.mask):
                return
            example = example or _difference({"loss": before["loss"]}, after, scene.mask)
        if example:
            raise Disproved(
                f"{example}, for an entropy larger by 0.1, but no gradient changes: entropies have "
                "none, set algorithm.entropy_coefficient"
            )


def _constants(function: Function) -> list[float]:
    """Returns the numbers in a function's arguments and module, where its results may jump."""
    call = implementation(function)
    assert isinstance(function.call, functools.partial)
    tree = ast.parse(inspect.getsource(sys.modules[call.__module__]))
    literals = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    arguments = tree_leaves(function.call.keywords)
    numbers = (*arguments, *literals, *tree_leaves([*call.__globals__.values()]))
    return [*dict.fromkeys(float(one) for one in numbers if type(one) in (int, float))][:MOST]


def _summed(values: Tensor, inputs: Inputs) -> Tensor:
    return torch.where(inputs.tokens.mask, values * inputs.shares, 0.0).sum()


def _gradient(total: Tensor, leaf: Tensor) -> Tensor:
    some = None
    if total.requires_grad:
        (some,) = torch.autograd.grad(total, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if some is None else some


def _difference(
    one: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    mask: Tensor | None = None,
    *,
    exactly: bool = False,
) -> str:
    """Describes the first value in which `other` differs from `one`, at a token of `mask` if given.

    Returns "" if no value differs. Values may differ by rounding, unless `exactly` is set.
    """
    for name, mine in one.items():
        theirs = other.get(name)
        if theirs is None:
            return f"there is no {name}"
        is_same = torch.isclose(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
        if exactly:
            is_same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        if mask is not None:
            is_same |= ~mask
        for place in torch.nonzero(~is_same)[:1, 0].tolist():
            return f"{name} of token {place} is {theirs[place]:.9g}, not {mine[place]:.9g}"
    return ""


def _check_untouched(tokens: LossInputs, untouched: LossInputs) -> None:
    # A change through `data` or numpy does not raise the version of a tensor.
    for name, value in vars(untouched).items():
        if isinstance(value, Tensor) and not torch.equal(getattr(tokens, name), value):
            raise Disproved(f"it changed its input {name} in place")


class _HeldConstant(TorchFunctionMode):
    """Records values that a function detaches from the gradient, or replaces them by `recorded`."""

    def __init__(self, recorded: Sequence[object] | None = None) -> None:
        super().__init__()
        self.recorded: list[object] = []
        self._given = None if recorded is None else iter(recorded)
        # The lines of code where a number was detached.
        self.lines: dict[str, None] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if not _carry((args, kwargs)) or _carry(result):
            return result
        line = _line_of_function()
        if line is None:
            return result
        if self._given is not None:
            result = next(self._given)
        else:
            self.recorded.append(result)
            is_tensor = isinstance(result, Tensor) and result.is_floating_point()
            if is_tensor or isinstance(result, float):
                self.lines.setdefault(line)
        return result.clone() if isinstance(result, Tensor) else result


def _carry(values: object) -> bool:
    """Whether a tensor with a gradient is among the values, at any depth."""
    return any(isinstance(one, Tensor) and one.requires_grad for one in tree_leaves(values))


def _line_of_function() -> str | None:
    """Returns the current "file:line" of the tested function; None in an autograd Function."""
    line = ""
    for frame, number in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        if file == __file__:
            break
        if frame.f_code is _APPLY:
            return None
        if not line and file != _SUMS and "/torch/" not in file:
            line = f"{Path(file).name}:{number}"
    return line
