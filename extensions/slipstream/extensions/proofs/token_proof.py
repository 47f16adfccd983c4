"""Proofs of a loss or a weight over layouts, ratios and repeated calls.

A property that fails gives one line with a small example. Layouts are compared in float64, extreme
values are tried in float32. A layout reorders the tokens of a scene, splits them into micro
batches, pads them, or gives the halves of each sequence to two ranks.

Values that a loss detaches by `detach`, `no_grad`, `item` or the sums of sequences are held
constant when its gradient is compared with finite differences. So CISPO, GSPO and REINFORCE pass,
and a custom backward pass must be right. A loss fails if it changes with the log-probabilities of
tokens whose advantages have one sign, but none of these tokens has a gradient.
"""

import ast
import functools
import inspect
import itertools
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from types import CodeType, MappingProxyType
from typing import TypeAlias

import numpy as np
import torch
from slipstream.core.errors import RunFailed
from slipstream.extensions.proofs import proof
from slipstream.extensions.proofs.shared_sums import (
    NUM_RANKS,
    UNEQUAL,
    SharedBatch,
    SharedSums,
    SumExchange,
)
from slipstream.learner.algorithms.functions import Function
from slipstream.learner.algorithms.inputs import BatchSums, LossInputs, RecordedSums, SequenceSums
from slipstream.learner.algorithms.losses import token_terms, token_weights
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# The name of the layout of context parallelism.
ON_TWO_RANKS = "a sequence on two ranks"
# That of data parallelism.
APART = "each sequence on one of two ranks"
# The index of a padding token in a layout.
FILLER = -1
# Indices of tokens, by micro batch.
Layout: TypeAlias = list[list[int]]
# Sequences of scenes: x is a trained token, any other is not.
SEQUENCES = (("x",), ("x", ".x"), ("..xx", ".x.xx"), ("..xxx", "....", "x.xxxx.xx", ".xxxx"))
LONG = ("." * 200 + "x" * 4800, ".xxx")
# How often policies that are far apart are drawn.
NUM_DRAWS = 4
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
# The code in which a custom autograd Function computes.
_APPLY: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


class _CountedSums(SequenceSums):
    """Counts the sums that a function asks for: ranks must ask for the same number."""

    num_asked = 0

    def _sums(self, values: Tensor) -> Tensor:
        self.num_asked += 1
        return super()._sums(values)


@dataclass(frozen=True)
class ProofCase:
    """A few test sequences, whose token fields are random.

    In `sequences` the letter x is a trained token, any other letter is a masked token.
    """

    sequences: tuple[str, ...]
    has_reference: bool
    # Whether tokens have log-probabilities by the versions that sampled them.
    has_versions: bool = False
    dtype: torch.dtype = torch.float64
    # Standard deviation of the log ratios. 0: the policy is that which sampled the tokens. From 1
    # on every third sequence is much nearer, and advantages are larger.
    spread: float = 0.3
    # Scenes that differ in nothing else have other random values.
    draw: int = 0

    def __str__(self) -> str:
        shown = [
            sequence if len(sequence) < 20 else f"{sequence[:8]}...({len(sequence)})"
            for sequence in self.sequences
        ]
        more = " ..." if len(shown) > 6 else ""
        wide = f", log ratios of deviation {self.spread:g}" if self.spread >= 1 else ""
        return f"sequences {' '.join(shown[:6])}{more} (x is a trained token){wide}"

    @functools.cached_property
    def mask(self) -> Tensor:
        """The mask of the trained tokens, bool [tokens]."""
        return torch.tensor([letter == "x" for sequence in self.sequences for letter in sequence])

    @functools.cached_property
    def ids(self) -> Tensor:
        """The index of each token's sequence, [tokens]."""
        return torch.tensor([i for i, sequence in enumerate(self.sequences) for _ in sequence])

    @functools.cached_property
    def fields(self) -> dict[str, Tensor]:
        """The values of all tokens by field name, such as `logprobs`; each tensor is [tokens].

        Masked tokens have values of the same range as trained ones. `shares` are the weights of the
        tokens in the sum whose gradient is taken.
        """
        size = len(self.mask)
        chance = np.random.default_rng([self.draw, size])
        logprobs = -0.2 - chance.exponential(1.0, size)
        gaps = chance.normal(0, self.spread, (2, size))
        if is_far := self.spread >= 1:
            gaps *= np.where(self.ids % 3 == 2, 0.1, 1.0)
        lags = chance.integers(0, 4, size, dtype=np.int32)
        is_given = (self.ids == 3).numpy()
        proximal = logprobs - gaps[0]
        columns = {
            "logprobs": logprobs,
            "proximal_logprobs": proximal,
            "behavior_logprobs": np.where(is_given, proximal, proximal - gaps[1]),
            # No advantage is near 0, and both signs are there.
            "advantages": chance.uniform(0.3, 20.0 if is_far else 2.0, size)
            * (1 - 2 * (np.arange(size) % 2)),
            "reference_logprobs": logprobs + chance.normal(0, 0.4, size),
            "entropy": chance.uniform(0.1, 2.0, size),
            "shares": chance.uniform(0.5, 1.5, size),
        }
        if self.has_versions:
            is_newest = is_given | (lags == 0)
            versions = proximal - chance.normal(0, self.spread, size)
            columns["version_logprobs"] = np.where(is_newest, proximal, versions)
        floats = {name: torch.from_numpy(values).to(self.dtype) for name, values in columns.items()}
        integers = {"is_given": is_given, "lags": lags, "versions": 10 - lags}
        return floats | {name: torch.from_numpy(values) for name, values in integers.items()}

    def layouts(self) -> dict[str, Layout]:
        """Returns other layouts than all sequences in their order in one micro batch, by name."""
        places_of = [
            torch.nonzero(self.ids == index)[:, 0].tolist() for index in range(len(self.sequences))
        ]
        return {
            "order of episodes": [[*chain(*places_of[::-1])]],
            "padding": [[place for places in places_of for place in (*places, FILLER, FILLER)]],
            "a micro batch for each sequence": places_of,
        }

    def sequences_of(self, rank: int) -> list[int]:
        """Returns the indices of the tokens of a data parallel rank, every second sequence.

        A filler stands behind them, so that no rank is without a token.
        """
        places = torch.nonzero(self.ids % NUM_RANKS == rank)[:, 0].tolist()
        return [*places, FILLER]

    def half(self, rank: int) -> list[int]:
        """Returns the indices of the tokens of a context parallel rank, half of each sequence.

        A filler stands behind them, so that no rank is without a token.
        """
        places: list[int] = []
        for sequence in range(len(self.sequences)):
            own_places = torch.nonzero(self.ids == sequence)[:, 0].tolist()
            middle = len(own_places) // 2
            places += own_places[middle:] if rank else own_places[:middle]
        return [*places, FILLER]

    def inputs(
        self,
        changed: Mapping[str, Tensor] = MappingProxyType({}),
        places: Sequence[int] | None = None,
    ) -> LossInputs:
        """Returns the inputs for the tokens at the indices `places`, by default all tokens.

        `changed` has fields, by name, that replace the scene's fields. The log-probabilities are a
        leaf, by which gradients are taken.
        """
        indices = torch.arange(len(self.mask)) if places is None else torch.tensor(places)
        is_filler = indices == FILLER
        fields = {
            name: torch.where(is_filler, torch.zeros((), dtype=values.dtype), values[indices])
            for name, values in {**self.fields, "mask": self.mask, **changed}.items()
        }
        del fields["shares"]
        reference = fields.pop("reference_logprobs")
        ids = torch.where(is_filler, len(self.sequences), self.ids[indices])
        return LossInputs(
            logprobs=fields.pop("logprobs").requires_grad_(),
            reference_logprobs=reference if self.has_reference else None,
            sequences=_CountedSums(ids, fields["mask"], len(self.sequences) + 1),
            batch=BatchSums(fields["mask"]),
            **fields,
        )


@dataclass(frozen=True)
class TokenProof:
    """The proof of a loss or a weight."""

    function: Function
    has_reference: bool = False
    has_versions: bool = False

    def faults(self) -> list[str]:
        """Returns one line for each required property that the function lacks."""
        properties: dict[str, Callable[[], object]] = {
            "result": self._check_result,
            "state": lambda: proof.check_state(self._scenes(), self._trained),
            "masked tokens": self._check_masked,
            "layout": self._check_layouts,
            "empty mask": self._check_empty,
            "finite": self._check_finite,
        }
        if self.function.kind == "loss":
            properties |= {"gradient": self._check_gradient, "entropy": self._check_entropy}
        return proof.faults(self.function, properties)

    def small_scenes(self) -> list[ProofCase]:
        """Returns a scene for each set of short sequences."""
        return [self._scene(sequences) for sequences in SEQUENCES]

    def _scene(self, sequences: tuple[str, ...]) -> ProofCase:
        return ProofCase(sequences, self.has_reference, self.has_versions)

    def _scenes(self) -> list[ProofCase]:
        """Returns small scenes, then scenes of policies far apart, then that of a long sequence."""
        small = self.small_scenes()
        # A number of a micro batch, such as a mean, may pass a bound in one draw and not in others.
        far = [
            replace(small[-1], spread=spread, draw=draw)
            for draw in range(NUM_DRAWS)
            for spread in (1.0, 3.0)
        ]
        return [*small, *far, replace(self._scene(LONG), spread=3.0)]

    def _result(self, tokens: LossInputs, scene: ProofCase) -> tuple[Tensor, Mapping[str, Tensor]]:
        if self.function.kind == "loss":
            terms = token_terms(self.function, tokens, str(scene))
            return terms.losses, terms.reports
        weights = token_weights(self.function, tokens, str(scene))
        return weights.weights, weights.reports

    def computed(
        self, scene: ProofCase, tokens: LossInputs, places: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Returns the function's values, gradient and reports by name, each float64 [tokens].

        `places` are the tokens' indices in the scene, by default all.
        """
        values, reports = self._result(tokens, scene)
        shares = scene.fields["shares"] if places is None else scene.fields["shares"][places]
        total = torch.where(tokens.mask, values * shares, 0.0).sum()
        gradient = None
        if total.requires_grad:
            (gradient,) = torch.autograd.grad(total, tokens.logprobs, allow_unused=True)
        results = {str(self.function.kind): values}
        results["gradient"] = torch.zeros_like(tokens.logprobs) if gradient is None else gradient
        results |= {f"report {name}": report for name, report in reports.items()}
        return {f"{name} of token": numbers.detach().double() for name, numbers in results.items()}

    def _trained(self, scene: ProofCase) -> dict[str, Tensor]:
        results = self.computed(scene, scene.inputs())
        return {name: torch.where(scene.mask, values, 0) for name, values in results.items()}

    def _check_result(self) -> None:
        for scene in self._scenes():
            single = replace(scene, dtype=torch.float32)
            tokens = single.inputs()
            self._result(tokens, single)
            _check_untouched(tokens, single.inputs())

    def _check_masked(self) -> None:
        for scene in self._scenes():
            mask = scene.mask
            chance = np.random.default_rng(5)
            limits = {name: (-60.0, 0.0) for name in scene.fields if name.endswith("logprobs")}
            limits |= {"advantages": (-9, 9), "entropy": (3, 6), "lags": (8, 9), "versions": (1, 2)}
            changed = {}
            for name, (low, high) in limits.items():
                field = scene.fields[name]
                other = torch.from_numpy(chance.uniform(low, high, len(mask)))
                changed[name] = torch.where(mask, field, other.to(field.dtype))
            before = self.computed(scene, scene.inputs())
            after = self.computed(scene, scene.inputs(changed))
            if fault := proof.difference(before, after, mask, exactly=True):
                raise RunFailed(f"{fault}, with other values at masked tokens: {scene}")
            gradient = after["gradient of token"]
            for place in torch.nonzero((gradient != 0) & ~mask)[:1, 0].tolist():
                slope = f"the gradient {gradient[place]:.6g}"
                raise RunFailed(f"masked token {place} has {slope}: {scene}")

    def _check_layouts(self) -> None:
        faults: dict[str, str] = {}
        for scene in self._scenes():
            expected = self.computed(scene, scene.inputs())
            computed: dict[str, Callable[[], dict[str, Tensor]]] = {
                title: functools.partial(self._in_layout, scene, layout)
                for title, layout in scene.layouts().items()
            }
            computed[ON_TWO_RANKS] = functools.partial(self._on_two_ranks, scene, scene.half)
            computed[APART] = functools.partial(self._on_two_ranks, scene, scene.sequences_of)
            for title, compute in computed.items():
                try:
                    fault = proof.difference(expected, compute(), scene.mask)
                except RunFailed as error:
                    fault = str(error)
                if fault:
                    faults.setdefault(title, f"{title}: {fault}: {scene}")
        if faults:
            fault, *_ = faults.values()
            also = f"; also with {', '.join([*faults][1:])}" if len(faults) > 1 else ""
            raise RunFailed(f"{fault}{also}")

    def _in_layout(self, scene: ProofCase, layout: Layout) -> dict[str, Tensor]:
        """Returns the results for all tokens, by name, in the scene's order of tokens.

        The micro batches are computed one after another. Raises RunFailed if they ask for different
        numbers of sums, for which ranks would wait for each other.
        """
        results: dict[str, Tensor] = {}
        num_sums = set()
        whole = scene.inputs(places=[*chain(*layout)])
        self._result(whole, scene)
        for places in layout:
            tokens = scene.inputs(places=places)
            recorded = RecordedSums(tokens.mask, whole.batch.asked)
            tokens = replace(tokens, batch=recorded)
            inside = torch.tensor(places) != FILLER
            for name, values in self.computed(scene, tokens, places).items():
                column = results.setdefault(name, torch.zeros(len(scene.mask), dtype=values.dtype))
                column[torch.tensor(places)[inside]] = values[inside]
            assert isinstance(tokens.sequences, _CountedSums)
            num_sums.add(tokens.sequences.num_asked)
        if len(num_sums) > 1:
            raise RunFailed(UNEQUAL)
        return results

    def _on_two_ranks(
        self, scene: ProofCase, places_of: Callable[[int], list[int]]
    ) -> dict[str, Tensor]:
        """Returns the results for all tokens of two ranks; `places_of` says which a rank has.

        As in a run, each rank computes all of its tokens for the numbers of the batch, and then
        again. Raises RunFailed if the ranks ask for different numbers of sums.
        """
        of_batch = SumExchange()
        exchange = SumExchange()

        def inputs(rank: int, sums: SumExchange) -> LossInputs:
            places = places_of(rank)
            tokens = scene.inputs(places=places)
            number = len(scene.sequences)
            is_filler = torch.tensor(places) == FILLER
            ids = torch.where(is_filler, number, scene.ids[places])
            shared = SharedSums(ids, tokens.mask, number + 1, rank=rank, exchange=sums)
            return replace(tokens, sequences=shared)

        def compute(rank: int) -> dict[str, Tensor]:
            try:
                tokens = inputs(rank, of_batch)
                shared = SharedBatch(tokens.mask, rank=rank, exchange=of_batch)
                self._result(replace(tokens, batch=shared), scene)
                of_batch.ends(rank)
                tokens = inputs(rank, exchange)
                recorded = RecordedSums(tokens.mask, shared.asked)
                return self.computed(scene, replace(tokens, batch=recorded), places_of(rank))
            finally:
                of_batch.ends(rank)
                exchange.ends(rank)

        with ThreadPoolExecutor(NUM_RANKS) as threads:
            parts = list(threads.map(compute, range(NUM_RANKS)))
        joined: dict[str, Tensor] = {}
        for rank, part in enumerate(parts):
            places = torch.tensor(places_of(rank))
            is_token = places != FILLER
            for name, values in part.items():
                column = joined.setdefault(name, torch.zeros(len(scene.mask), dtype=values.dtype))
                column[places[is_token]] = values[is_token]
        return joined

    def _check_empty(self) -> None:
        for sequences in ((".",), ("..", "...")):
            scene = replace(self._scene(sequences), dtype=torch.float32)
            gradient = self.computed(scene, scene.inputs())["gradient of token"]
            if not gradient.isfinite().all():
                raise RunFailed(
                    f"the gradient is not finite: {len(scene.mask)} tokens, none trained"
                )

    def _check_finite(self) -> None:
        ratios = itertools.product(LOG_RATIOS, LOG_RATIOS, (1.0, -1.0, 0.0), (1.0, 0.0))
        cases = sorted(ratios, key=lambda case: abs(case[0]) + abs(case[1]))
        bounds = {0.0}
        for number in _constants(self.function):
            ratios_of_bound = (number, 1 + number, 1 - number)
            bounds |= {number, -number}
            bounds |= {math.log(ratio) for ratio in ratios_of_bound if ratio > 0}
        near = np.array(sorted(b for b in bounds if abs(b) <= max(LOG_RATIOS)), dtype=np.float32)
        # Logarithms of ratios are rounded: a neighbour in float32 meets the bound itself.
        exact = near[:, None] + np.spacing(near)[:, None] * NEIGHBOURS
        rows = [
            [(number, number, sign, 1.0) for number in row]
            for row in exact.tolist()
            for sign in (1.0, -1.0)
        ]
        self._check_cases([[case] for case in (*cases, *chain(*rows))])
        # In sequences of equal tokens sums are large, and deviations are 0 up to rounding.
        self._check_cases([*([case] * len(NEIGHBOURS) for case in cases), *rows])

    def _check_cases(self, sequences: Sequence[Sequence[Case]]) -> None:
        """Raises RunFailed if a value is not finite at a case, or if an input is changed."""
        cases = [case for sequence in sequences for case in sequence]
        numbers = torch.tensor(cases, dtype=torch.float32).unbind(1)
        to_proximal, to_behavior, advantages, entropy = numbers
        # The largest of the three is 0, so that a difference is exact.
        logprobs = -torch.stack([-to_proximal, -to_behavior, torch.zeros(len(cases))]).amax(0)
        shown = tuple("x" * len(sequence) for sequence in sequences)
        scene = replace(self._scene(shown), dtype=torch.float32)
        changed = {
            "logprobs": logprobs,
            "proximal_logprobs": logprobs - to_proximal,
            "behavior_logprobs": logprobs - to_behavior,
            "reference_logprobs": logprobs - to_behavior,
            "advantages": advantages,
            "entropy": entropy,
        }
        tokens = scene.inputs(changed)
        results = self.computed(scene, tokens)
        _check_untouched(tokens, scene.inputs(changed))
        for name, values in results.items():
            for place in torch.nonzero(~values.isfinite())[:1, 0].tolist():
                first, second, advantage, other = cases[place]
                length = len(shown[int(scene.ids[place])])
                inside = f", in a sequence of {length}" if length > 1 else ""
                raise RunFailed(
                    f"{name.removesuffix(' of token')} is {values[place]:g} at log ratio "
                    f"{first:.7g} to the proximal and {second:.7g} to the behavior policy, "
                    f"advantage {advantage:g}, entropy {other:g}{inside}"
                )

    def _check_gradient(self) -> None:
        # By sign of the advantage: whether a token has a gradient, and an example of a token that
        # changes the loss.
        has_gradient = {1: False, -1: False}
        moves: dict[int, str] = {}
        for scene in [
            *self.small_scenes(),
            *(replace(scene, spread=0.0) for scene in self.small_scenes()),
        ]:
            tokens = scene.inputs()
            with _HeldConstant() as constants:
                values = self._result(tokens, scene)[0]
            total = (values * scene.fields["shares"])[scene.mask].sum()
            gradient = torch.autograd.grad(total, tokens.logprobs)[0].tolist()
            moved = functools.partial(self.moved, scene)
            middle = float(total.detach())
            for place in torch.nonzero(scene.mask)[:, 0].tolist():
                slope = gradient[place]
                slopes = []
                for step, tolerance in STEPS:
                    after = (moved(place, step, constants.recorded) - middle) / step
                    before = (middle - moved(place, -step, constants.recorded)) / step
                    # At a kink any slope between the slopes of both sides is right.
                    slopes.append((after + before) / 2)
                    allowed = abs(after - before) / 2 + tolerance * (1 + abs(slope))
                    if abs(slope - slopes[-1]) <= allowed:
                        break
                else:
                    raise RunFailed(
                        f"that of token {place} is {slope:.6g}, but {slopes[0]:.6g} by finite "
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
                raise RunFailed(
                    f"no token with a {'positive' if sign > 0 else 'negative'} advantage has one, "
                    f"but the loss moves by {example}"
                )

    def moved(
        self, scene: ProofCase, place: int, step: float, recorded: Sequence[object] | None
    ) -> float:
        """Returns the sum of the losses with `step` added to the log-probability at `place`.

        `recorded` has detached values to use again, so that they stay constant. If it is None, the
        function recomputes them.
        """
        logprobs = scene.fields["logprobs"].clone()
        logprobs[place] += step
        tokens = scene.inputs({"logprobs": logprobs})
        with nullcontext() if recorded is None else _HeldConstant(recorded):
            values, _ = self._result(tokens, scene)
        return float((values * scene.fields["shares"])[scene.mask].sum().detach())

    def _check_entropy(self) -> None:
        example = ""
        for scene in self.small_scenes():
            larger = scene.inputs({"entropy": scene.fields["entropy"] + 0.1})
            before = self.computed(scene, scene.inputs())
            after = self.computed(scene, larger)
            gradient = "gradient of token"
            loss = "loss of token"
            if proof.difference({gradient: before[gradient]}, after, scene.mask):
                return
            example = example or proof.difference({loss: before[loss]}, after, scene.mask)
        if example:
            raise RunFailed(
                f"{example}, for an entropy larger by 0.1, but no gradient changes: entropies have "
                "none, set algorithm.entropy_coefficient"
            )


def _constants(function: Function) -> list[float]:
    """Returns the numbers in a function's arguments and module, where its results may jump."""
    call = proof.implementation(function)
    assert isinstance(function.call, functools.partial)
    tree = ast.parse(inspect.getsource(sys.modules[call.__module__]))
    literals = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    arguments = tree_leaves(function.call.keywords)
    numbers = (*arguments, *literals, *tree_leaves([*call.__globals__.values()]))
    floats = dict.fromkeys(float(number) for number in numbers if type(number) in (int, float))
    return [*floats][:MOST]


def _check_untouched(tokens: LossInputs, untouched: LossInputs) -> None:
    # A change through `data` or numpy does not raise the version of a tensor.
    for name, value in vars(untouched).items():
        if isinstance(value, Tensor) and not torch.equal(getattr(tokens, name), value):
            raise RunFailed(f"it changed its input {name} in place")


class _HeldConstant(TorchFunctionMode):
    """Records values that a function detaches from the gradient, or replaces them by `recorded`."""

    def __init__(self, recorded: Sequence[object] | None = None) -> None:
        super().__init__()
        self.recorded: list[object] = []
        self._given = None if recorded is None else iter(recorded)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if not _carry((args, kwargs)) or _carry(result) or _is_in_autograd():
            return result
        if self._given is not None:
            result = next(self._given)
        else:
            self.recorded.append(result)
        return result.clone() if isinstance(result, Tensor) else result


def _carry(values: object) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves(values))


def _is_in_autograd() -> bool:
    """Whether a custom autograd Function computes, inside of which nothing has a gradient."""
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        if frame.f_code is _APPLY:
            return True
        if frame.f_code.co_filename == __file__:
            break
    return False
