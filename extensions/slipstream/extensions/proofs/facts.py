"""What functions do that have passed their proof: facts, on which only their author can judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.extensions.proofs.proof import EQUAL, PLAIN, EpisodeProof, Rewards
from slipstream.extensions.proofs.token_proof import ProofCase, TokenProof

# The smallest slope that counts, and the step of finite differences.
SMALL = 1e-9
STEP = 1e-4
GRADIENT = "gradient of token"


def facts_of_tokens(proof: TokenProof) -> list[str]:
    """Returns facts on a loss or a weight, one a line."""
    name = str(proof.function)
    if proof.function.kind == "weight":
        return [f"{name}: {_ranges_of_weights(proof)}"]
    facts = [
        _direction(proof),
        _advantages_matter(proof),
        _held_constant(proof),
    ]
    return [f"{name}: {fact}" for fact in facts if fact]


def facts_of_filter(algorithm: AlgorithmSection) -> list[str]:
    """Returns how many groups of equal rewards, and of others, a filter keeps."""
    proof = EpisodeProof(algorithm, "filter")
    equal_groups = []
    for scene in EQUAL:
        equal_groups += [group for group in scene if len(group) > 1 and len(set(group)) == 1]
    unequal_groups = []
    for scene in PLAIN:
        unequal_groups += [group for group in scene if len(set(group)) > 1]
    equal_share = _share_kept(proof, equal_groups)
    unequal_share = _share_kept(proof, unequal_groups)
    name = f"filter {algorithm.filter}"
    return [f"{name}: keeps {equal_share} groups of equal rewards, {unequal_share} of unequal ones"]


def _share_kept(proof: EpisodeProof, groups: Sequence[tuple[float, ...]]) -> str:
    num_kept = 0
    for group in groups:
        scene = Rewards([group])
        result = proof.numbers(scene)["result"]
        num_kept += bool(result)
    return f"{num_kept} of {len(groups)}"


def _on_policy(proof: TokenProof) -> list[ProofCase]:
    """Returns scenes in which policy, proximal and sampling policy are one."""
    scenes = proof.small_scenes()
    return [replace(scene, spread=0.0) for scene in scenes]


def _trained_places(scene: ProofCase) -> list[int]:
    places = torch.nonzero(scene.mask)
    return [int(place) for place in places]


def _direction(proof: TokenProof) -> str:
    """Says where a step takes the tokens of each sign of the advantage, on policy."""
    moves: dict[str, Counter[str]] = {
        "positive": Counter(),
        "negative": Counter(),
    }
    for scene in _on_policy(proof):
        tokens = scene.inputs()
        gradient = proof.computed(scene, tokens)[GRADIENT]
        for place in _trained_places(scene):
            slope = float(gradient[place])
            move = "likelier" if slope < 0 else "less likely"
            if abs(slope) <= SMALL:
                move = "unchanged"
            advantage = float(tokens.advantages[place])
            sign = "positive" if advantage > 0 else "negative"
            moves[sign][move] += 1
    clauses = []
    for sign, counts in moves.items():
        clauses.append(f"of {sign} advantage {_in_words(counts)}")
    return f"on policy a token becomes, {', '.join(clauses)}"


def _in_words(counts: Counter[str]) -> str:
    """Returns the moves, the most frequent first, with their numbers if there are several."""
    if len(counts) == 1:
        (move,) = counts
        return move
    total = counts.total()
    parts = []
    for move, number in counts.most_common():
        parts.append(f"{move} ({number} of {total})")
    return " or ".join(parts)


def _advantages_matter(proof: TokenProof) -> str:
    """Says whether the gradient stays if all advantages are doubled, or ""."""
    for scene in proof.small_scenes():
        tokens = scene.inputs()
        doubled = replace(tokens, advantages=2 * tokens.advantages)
        gradient = proof.computed(scene, tokens)[GRADIENT]
        other_gradient = proof.computed(scene, doubled)[GRADIENT]
        changes = (other_gradient - gradient).abs()
        if bool((changes > SMALL)[scene.mask].any()):
            return ""
    return "its gradient does not depend on advantages"


def _slopes(proof: TokenProof) -> Iterator[tuple[float, float]]:
    """Yields the gradient of each trained token, and how the loss moves with nothing held."""
    for scene in proof.small_scenes():
        gradient = proof.computed(scene, scene.inputs())[GRADIENT]
        for place in _trained_places(scene):
            above = proof.moved(scene, place, STEP, None)
            below = proof.moved(scene, place, -STEP, None)
            rise = (above - below) / (2 * STEP)
            yield float(gradient[place]), rise


def _held_constant(proof: TokenProof) -> str:
    """Says for how many tokens the loss moves otherwise than its gradient, or ""."""
    differences = []
    for slope, rise in _slopes(proof):
        is_other = abs(rise - slope) > 1e-3 * (1 + abs(rise))
        differences.append(is_other)
    number = sum(differences)
    if not number:
        return ""
    return (
        f"{number} of {len(differences)} tokens move it by more or less than their gradient: "
        "terms without one, such as by detach or sums"
    )


def _ranges_of_weights(proof: TokenProof) -> str:
    """Says the range of weights on policy, and where policies are apart."""
    far_scenes = [replace(scene, spread=3.0) for scene in proof.small_scenes()]
    near = _range(proof, _on_policy(proof))
    far = _range(proof, far_scenes)
    return f"weights from {near} on policy, from {far} where ratios are far"


def _range(proof: TokenProof, scenes: Sequence[ProofCase]) -> str:
    weights = []
    for scene in scenes:
        values = proof.computed(scene, scene.inputs())
        weights.append(values["weight of token"][scene.mask])
    numbers = torch.cat(weights)
    lowest = float(numbers.min())
    highest = float(numbers.max())
    return f"{lowest:.3g} to {highest:.3g}"
