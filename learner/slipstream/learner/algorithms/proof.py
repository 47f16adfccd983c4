"""Property tests, called proofs, of a loss or a weight over layouts, ratios and repeated calls.

A property that fails gives one line with a small example. Layouts are compared in float64, extreme
values are tried in float32.

Values that a loss detaches by `detach`, `no_grad`, `item` or the sums of sequences are held
constant when its gradient is compared with finite differences. So CISPO, GSPO and REINFORCE pass,
and a custom backward pass must be right. A loss fails if it changes with the log-probabilities of
tokens whose advantages have one sign, but none of these tokens has a gradient.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from slipstream.core.errors import RunFailed
from slipstream.learner.algorithms.functions import Function
from slipstream.learner.algorithms.inputs import LossInputs, SequenceSums
from slipstream.learner.algorithms.proof_scenes import (
    Compute,
    Disproved,
    Inputs,
    Layout,
    Scene,
    inputs_of,
    values_of,
)
from slipstream.learner.algorithms.token_functions import token_terms, token_weights
from torch import Tensor
from torch.overrides import TorchFunctionMode

Subject = TypeVar("Subject")
# Sequences of scenes: x is a trained token, any other is not.
SCENES = (("x",), ("x", ".x"), ("..xx", ".x.xx"), ("..xxx", "....", "x.xxxx.xx", ".xxxx"))
# Log ratios to the proximal and the behavior policy, advantage and entropy of a token.
Case: TypeAlias = tuple[float, float, float, float]
# Logarithms of ratios from 1e-20 to 1e20.
LOG_RATIOS = (0.0, 0.3, -0.3, 5.0, -5.0, 20.0, -20.0, 46.05, -46.05)
# The most constants of a function that are tried as bounds, and the offsets of the float32
# neighbours of each bound.
MAX_CONSTANTS = 24
NEIGHBOURS = np.arange(-4, 5, dtype=np.float32)
# Steps of finite differences with their tolerance: a function may compute in float32.
STEPS = ((1e-5, 1e-4), (1e-3, 1e-2))
COST_TOKENS = 16384
COST_ROUNDS = 5


@dataclass(frozen=True)
class Proved:
    """The function under test: the loss or the weight of an algorithm."""

    function: Function
    has_reference: bool = False

    @property
    def constants(self) -> tuple[float, ...]:
        """The numbers in the function's code and arguments, around which its results may jump.

        The code includes functions of the same module that the function calls. There are at most
        `MAX_CONSTANTS` numbers, all of magnitude below 1000.
        """
        call = self.function.call
        assert isinstance(call, functools.partial)
        function = inspect.unwrap(call.func)
        arguments = (function.__kwdefaults__ or {}) | call.keywords
        found = dict.fromkeys(_numbers([*arguments.values(), function], set()))
        return tuple(one for one in found if abs(one) < 1e3)[:MAX_CONSTANTS]


def _numbers(value: object, seen: set[FunctionType]) -> Iterator[float]:
    if isinstance(value, FunctionType):
        if value in seen:
            return
        seen.add(value)
        codes, module = [value.__code__], value.__module__
        # Nested functions are among the constants of a function.
        for code in codes:
            codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        named = [value.__globals__.get(name) for code in codes for name in code.co_names]
        its_own = [one for one in named if getattr(one, "__module__", module) == module]
        value = [*(code.co_consts for code in codes), *its_own]
    if isinstance(value, (tuple, list)):
        yield from itertools.chain.from_iterable(_numbers(one, seen) for one in value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def token_faults(proved: Proved) -> list[str]:
    """Returns one line for each required property that the loss or weight under test lacks."""
    properties: dict[str, Callable[[Proved], None]] = {
        "result": _check_result,
        "state": _check_state,
        "masked tokens": _check_masked,
        "layout": _check_layouts,
        "empty mask": _check_empty,
        "finite": _check_finite,
    }
    if proved.function.kind == "loss":
        properties |= {"gradient": _check_gradient, "entropy": _check_entropy}
    return faults(proved.function, proved, properties)


def faults(
    function: Function, subject: Subject, properties: Mapping[str, Callable[[Subject], None]]
) -> list[str]:
    """Returns one line for each of `properties` whose check fails for `subject`.

    If one of the first two fails, the others are not checked. If all hold, a change of the globals
    of the function's module is a fault. The random generators are restored afterwards.
    """
    found, name, before = [], str(function), _kept_by(function)
    state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), np.errstate(all="ignore"):
        for place, (title, check) in enumerate(properties.items()):
            fault = _fault(check, subject)
            if fault:
                found.append(f"{name}: {title}: {fault.removeprefix(f'{name} at ')}")
                # The other checks say nothing if one of these two fails.
                if place < 2:
                    break
    random.setstate(state)
    np.random.set_state(numpy_state)
    changed = sorted(key for key, value in _kept_by(function).items() if value != before.get(key))
    if changed and not found:
        found.append(f"{name}: state: calls change {', '.join(changed)} of its module")
    return found


def _kept_by(function: Function) -> dict[str, str]:
    """Returns the repr of each global of the function's module, by name, to detect changes."""
    assert isinstance(function.call, functools.partial)
    call = inspect.unwrap(function.call.func)
    kept = {}
    for name, value in call.__globals__.items():
        if not name.startswith("__"):
            is_own = getattr(value, "__module__", "") == call.__module__
            kept[name] = repr((value, is_own and getattr(value, "__dict__", None)))
    return kept


def _fault(check: Callable[[Subject], None], subject: Subject) -> str:
    try:
        check(subject)
    except RunFailed as fault:
        return str(fault)
    return ""


def reseed(seed: int) -> None:
    """Seeds the random generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _scenes(
    proved: Proved, *, dtype: torch.dtype = torch.float64, is_on_policy: bool = False
) -> Iterator[Scene]:
    for sequences in SCENES:
        yield Scene(sequences, proved.has_reference, dtype=dtype, is_on_policy=is_on_policy)


def _result(
    proved: Proved, tokens: LossInputs, scene: Scene
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Returns the losses or weights, and the reports."""
    if proved.function.kind == "loss":
        terms = token_terms(proved.function, tokens, str(scene))
        return terms.losses, terms.reports
    weights = token_weights(proved.function, tokens, str(scene))
    return weights.weights, weights.reports


def _sum(proved: Proved, scene: Scene, inputs: Inputs) -> Tensor:
    values, _ = _result(proved, inputs.tokens, scene)
    return torch.where(inputs.tokens.mask, values * inputs.shares, 0.0).sum()


def _gradient(total: Tensor, leaf: Tensor) -> Tensor:
    some = None
    if total.requires_grad:
        (some,) = torch.autograd.grad(total, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if some is None else some


def _computed(proved: Proved, scene: Scene, inputs: Inputs) -> dict[str, Tensor]:
    """Returns the function's values, gradient and reports by name, each float64 [tokens]."""
    values, reports = _result(proved, inputs.tokens, scene)
    total = torch.where(inputs.tokens.mask, values * inputs.shares, 0.0).sum()
    found = {str(proved.function.kind): values, "gradient": _gradient(total, inputs.leaf)}
    found |= {f"report {name}": one for name, one in reports.items()}
    return {name: one.detach().double() for name, one in found.items()}


def _difference(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], mask: Tensor, *, exactly: bool = False
) -> str:
    """Describes the first value in which `other` differs from `one` at a token of `mask`.

    Returns "" if no value differs. Values may differ by rounding, unless `exactly` is set.
    """
    for name, mine in one.items():
        theirs = other.get(name)
        if theirs is None:
            return f"there is no {name}"
        is_same = torch.isclose(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
        if exactly:
            is_same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        for place in torch.nonzero(~is_same & mask)[:1, 0].tolist():
            return f"{name} of token {place} is {theirs[place]:.9g}, not {mine[place]:.9g}"
    return ""


def _check_result(proved: Proved) -> None:
    for scene in _scenes(proved, dtype=torch.float32):
        tokens = inputs_of(scene).tokens
        _result(proved, tokens, scene)
        _check_untouched(tokens, inputs_of(scene).tokens)


def _check_untouched(tokens: LossInputs, untouched: LossInputs) -> None:
    # A change through `data` or numpy does not raise the version of a tensor.
    for name, value in vars(untouched).items():
        if isinstance(value, Tensor) and not torch.equal(getattr(tokens, name), value):
            raise Disproved(f"it changed its input {name} in place")


def _check_state(proved: Proved) -> None:
    other = Scene(SCENES[2], proved.has_reference, seed=1)
    for scene in _scenes(proved):
        results = []
        for seed in range(3):
            reseed(seed)
            results.append(_computed(proved, scene, inputs_of(scene)))
            _computed(proved, other, inputs_of(other))
        for again in results[1:]:
            if difference := _difference(results[0], again, scene.mask, exactly=True):
                raise Disproved(
                    f"{difference}, in a later call with the same inputs and other random seeds: "
                    f"{scene}"
                )


def _check_masked(proved: Proved) -> None:
    for scene in _scenes(proved):
        mask, chance = scene.mask, np.random.default_rng(5)
        limits = {name: (-60.0, 0.0) for name in scene.fields if name.endswith("logprobs")}
        limits |= {"advantages": (-9, 9), "entropy": (3, 6), "lags": (8, 9), "versions": (1, 2)}
        changed = {}
        for name, (low, high) in limits.items():
            other = torch.from_numpy(chance.uniform(low, high, len(mask)))
            changed[name] = torch.where(
                mask, scene.fields[name], other.to(scene.fields[name].dtype)
            )
        before = _computed(proved, scene, inputs_of(scene))
        after = _computed(proved, scene, inputs_of(scene, changed=changed))
        if difference := _difference(before, after, mask, exactly=True):
            raise Disproved(f"{difference}, with other values at masked tokens: {scene}")
        for place in torch.nonzero((after["gradient"] != 0) & ~mask)[:1, 0].tolist():
            gradient = after["gradient"][place]
            raise Disproved(f"masked token {place} has the gradient {gradient:.6g}: {scene}")


def _check_layouts(proved: Proved) -> None:
    found: dict[str, str] = {}
    for scene in _scenes(proved):
        compute = functools.partial(_computed, proved, scene)
        (_, first), *others = scene.layouts().items()
        check = functools.partial(_check_layout, scene, compute, values_of(scene, first, compute))
        for title, layout in others:
            fault = _fault(check, layout)
            if fault and title not in found:
                found[title] = f"{title}: {fault}: {scene}"
    if found:
        fault, *_ = found.values()
        also = f"; also with {', '.join([*found][1:])}" if len(found) > 1 else ""
        raise Disproved(f"{fault}{also}")


def _check_layout(
    scene: Scene, compute: Compute, whole: Mapping[str, Tensor], layout: Layout
) -> None:
    if difference := _difference(whole, values_of(scene, layout, compute), scene.mask):
        raise Disproved(difference)


def _check_empty(proved: Proved) -> None:
    for sequences in ((".",), ("..", "...")):
        scene = Scene(sequences, proved.has_reference, dtype=torch.float32)
        if not _computed(proved, scene, inputs_of(scene))["gradient"].isfinite().all():
            raise Disproved(f"the gradient is not finite: {len(scene.mask)} tokens, none trained")


def _check_finite(proved: Proved) -> None:
    ratios = itertools.product(LOG_RATIOS, LOG_RATIOS, (1.0, -1.0, 0.0), (1.0, 0.0))
    cases = sorted(ratios, key=lambda case: abs(case[0]) + abs(case[1]))
    bounds = {0.0}
    for one in proved.constants:
        bounds |= {one, -one} | {math.log(x) for x in (one, 1 + one, 1 - one) if x > 0}
    near = np.array(sorted(b for b in bounds if abs(b) <= max(LOG_RATIOS)), dtype=np.float32)
    # Logarithms of ratios are rounded: a neighbour in float32 meets the bound itself.
    exact = near[:, None] + np.spacing(near)[:, None] * NEIGHBOURS
    rows = [
        [(one, one, sign, 1.0) for one in row] for row in exact.tolist() for sign in (1.0, -1.0)
    ]
    _check_cases(proved, [[case] for case in cases])
    _check_cases(proved, [[case] for row in rows for case in row])
    # Sequences of equal tokens: their sums are large, and their deviations are 0 up to rounding.
    _check_cases(proved, [*([case] * len(NEIGHBOURS) for case in cases), *rows])


def _check_cases(proved: Proved, sequences: Sequence[Sequence[Case]]) -> None:
    """Raises Disproved for a case at which a value is not finite, or if an input is changed."""
    cases = [case for sequence in sequences for case in sequence]
    numbers = torch.tensor(cases, dtype=torch.float32).unbind(1)
    to_proximal, to_behavior, advantages, entropy = numbers
    # The largest of the three is 0, so that a difference is exact.
    logprobs = -torch.stack([-to_proximal, -to_behavior, torch.zeros(len(cases))]).amax(0)
    shown = tuple("x" * len(sequence) for sequence in sequences)
    scene = Scene(shown, proved.has_reference, dtype=torch.float32)
    changed = {
        "logprobs": logprobs,
        "proximal_logprobs": logprobs - to_proximal,
        "behavior_logprobs": logprobs - to_behavior,
        "reference_logprobs": logprobs - to_behavior,
        "advantages": advantages,
        "entropy": entropy,
    }
    inputs = inputs_of(scene, changed=changed)
    found = _computed(proved, scene, inputs)
    _check_untouched(inputs.tokens, inputs_of(scene, changed=changed).tokens)
    for name, values in found.items():
        for place in torch.nonzero(~values.isfinite())[:1, 0].tolist():
            first, second, advantage, other = cases[place]
            sequence = shown[int(scene.ids[place])]
            raise Disproved(
                f"{name} is {values[place]:g} at log ratio {first:.7g} to the proximal and "
                f"{second:.7g} to the behavior policy, advantage {advantage:g}, entropy {other:g}"
                + f", in a sequence of {len(sequence)}"
                * (len(sequence) > 1)
            )


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
        if not _carry([*args, *(kwargs or {}).values()]) or _carry([result]):
            return result
        line = _line_of_function()
        if line is None:
            return result
        if self._given is not None:
            result = next(self._given)
        else:
            self.recorded.append(result)
            if (
                isinstance(result, Tensor)
                and result.is_floating_point()
                or isinstance(result, float)
            ):
                self.lines.setdefault(line)
        return result.clone() if isinstance(result, Tensor) else result


def _carry(values: Sequence[object]) -> bool:
    """Whether a tensor with a gradient is among the values, at any depth."""
    return any(
        one.requires_grad
        if isinstance(one, Tensor)
        else isinstance(one, (list, tuple)) and _carry(one)
        for one in values
    )


_APPLY: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_SUMS = SequenceSums.sums.__code__.co_filename


def _line_of_function() -> str | None:
    """Returns the current "file:line" of the tested function; None in an autograd Function."""
    frame, line = sys._getframe(2), ""
    while frame.f_code.co_filename != __file__ and frame.f_back is not None:
        if frame.f_code is _APPLY:
            return None
        file = frame.f_code.co_filename
        if not line and file != _SUMS and "/torch/" not in file:
            line = f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return line


def held_constant(proved: Proved) -> list[str]:
    """Returns the lines of code ("file:line") where a loss detaches a number from the gradient."""
    found: dict[str, None] = {}
    for scene in _scenes(proved):
        with _HeldConstant() as held:
            _result(proved, inputs_of(scene).tokens, scene)
        found |= held.lines
    return list(found)


def _check_gradient(proved: Proved) -> None:
    # By sign of the advantage: whether a token has a gradient, and an example of a token that
    # changes the loss.
    has_gradient = {1: False, -1: False}
    moves: dict[int, str] = {}
    for scene in [*_scenes(proved), *_scenes(proved, is_on_policy=True)]:
        inputs = inputs_of(scene)
        with _HeldConstant() as held:
            total = _sum(proved, scene, inputs)
        gradient = _gradient(total, inputs.leaf).tolist()
        moved = functools.partial(_moved, proved, scene)
        middle = float(total.detach())
        for place in torch.nonzero(scene.mask)[:, 0].tolist():
            slope, found = gradient[place], []
            for step, tolerance in STEPS:
                after = (moved(place, step, held.recorded) - middle) / step
                before = (middle - moved(place, -step, held.recorded)) / step
                # At a kink any slope between the slopes of both sides is right.
                found.append((after + before) / 2)
                if abs(slope - found[-1]) <= abs(after - before) / 2 + tolerance * (1 + abs(slope)):
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
                f"no token with a {'positive' if sign > 0 else 'negative'} advantage has one, but "
                f"the loss moves by {example}; taken out at {', '.join(held_constant(proved))}"
            )


def _check_entropy(proved: Proved) -> None:
    example = ""
    for scene in _scenes(proved):
        larger = {"entropy": scene.fields["entropy"] + 0.1}
        before = _computed(proved, scene, inputs_of(scene))
        after = _computed(proved, scene, inputs_of(scene, changed=larger))
        if _difference({"gradient": before["gradient"]}, after, scene.mask):
            return
        example = example or _difference({"loss": before["loss"]}, after, scene.mask)
    if example:
        raise Disproved(
            f"{example}, for an entropy larger by 0.1, but no gradient changes: entropies have "
            "none, set algorithm.entropy_coefficient"
        )


def _moved(
    proved: Proved, scene: Scene, place: int, step: float, recorded: Sequence[object] | None
) -> float:
    """Returns the sum of the results after `step` is added to the log-probability at index `place`.

    `recorded` has detached values to use again, so that they stay constant. If it is None, the
    function recomputes them.
    """
    logprobs = scene.fields["logprobs"].clone()
    logprobs[place] += step
    inputs = inputs_of(scene, changed={"logprobs": logprobs})
    if recorded is None:
        return float(_sum(proved, scene, inputs).detach())
    with _HeldConstant(recorded):
        found = _sum(proved, scene, inputs)
    return float(found.detach())


def cost_ns(proved: Proved) -> float:
    """Returns the CPU time of a forward and backward pass on one thread, in ns per token.

    The result is the least of `COST_ROUNDS` rounds.
    """
    sequences = ("x" * 64,) * (COST_TOKENS // 64)
    scene = Scene(sequences, proved.has_reference, dtype=torch.float32)
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for _ in range(COST_ROUNDS):
        inputs = inputs_of(scene)
        started = time.thread_time()
        _computed(proved, scene, inputs)
        times.append(time.thread_time() - started)
    torch.set_num_threads(threads)
    return min(times) / COST_TOKENS * 1e9
