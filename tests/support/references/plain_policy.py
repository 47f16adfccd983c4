"""The parity tests' algorithms on transformers and torch alone: one trajectory after the other."""

import dataclasses
import functools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slipstream.core.settings.config import Config
from slipstream.core.types import ReferenceLogprobs, RoutedExperts, Trajectory
from slipstream.learner.trainer.batches.batch import Batch
from torch import Tensor

from support.ranks.parity_layouts import probe
from support.references import plain_algorithm
from support.references.plain_muon import PlainMuon


class ForcedExperts:
    """Sends tokens to given experts in transformers' model, weighted as it weights its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.expert_ids: np.ndarray | None = None
        # What routers said of trained sequences, [tokens, experts], by the place of the layer.
        self.logits: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.differing, self.forced = 0, 0
        decoder = getattr(model.model, "language_model", model.model)
        for place, layer in enumerate(decoder.layers):
            mlp = getattr(layer, "mlp", None)
            router = getattr(mlp, "gate", getattr(mlp, "router", None))
            if router is not None:
                router.register_forward_hook(functools.partial(self._force, place))

    def _force(
        self, place: int, gate: torch.nn.Module, _: object, outputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        if torch.is_grad_enabled():
            self.logits[place].append(outputs[0])
        if self.expert_ids is None:
            return None
        logits, _, indices = outputs
        indices = indices.clone()
        for token, wanted in enumerate(self.expert_ids[:, place].tolist()):
            if max(wanted) < gate.num_experts:
                if torch.is_grad_enabled():
                    self.differing += len(set(wanted) - set(indices[token].tolist()))
                    self.forced += len(wanted)
                indices[token] = torch.tensor(wanted)
        is_sigmoid = hasattr(gate, "e_score_correction_bias")
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
        weights = scores.gather(1, indices)
        # Those of gpt-oss always add up to 1.
        scale = getattr(gate, "routed_scaling_factor", None)
        if getattr(gate, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * (scale or 1.0), indices


def plain_model(path: Path, **changes: object) -> Any:
    """transformers' model of a folder in float32, with changes to its config.json."""
    import transformers

    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    # transformers has their class, but does not know the `model_type` of Kimi K2 and MiMo.
    kind = getattr(transformers, {"MiMoForCausalLM": "Qwen2ForCausalLM"}.get(name, name))
    config = kind.config_class.from_pretrained(path)
    for field, value in {"model_type": kind.config_class.model_type, **changes}.items():
        setattr(config, field, value)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return kind.from_pretrained(path, config=config, **options)


@dataclass
class Tokens:
    """The sampled tokens of one conversation."""

    policy: Tensor
    entropy: Tensor
    before: Tensor
    behavior: Tensor
    advantage: float
    # The divergence from a reference at each token; 0 without one.
    divergence: Tensor


class PlainPolicy:
    """Unpacked, without parallelism; written from the papers' formulas, a sequence at a time."""

    def __init__(self, path: Path, config: Config) -> None:
        self.config = config
        self.model = plain_model(path)
        self.forced = ForcedExperts(self.model)
        named = dict(self.model.named_parameters())
        # Biases of all experts together are a matrix.
        matrices = {n for n, p in named.items() if p.dim() > 1 and not n.endswith("_bias")}
        self.muon = None
        if config.learner.optimizer.get("optimizer") == "muon":
            self.muon = PlainMuon(self.model, config.learner.optimizer)
            orthogonal = {p for parts in self.muon.matrices for p, _ in parts}
            named = {name: p for name, p in named.items() if p not in orthogonal}
        decayed = [named[name] for name in named if name in matrices]
        others = [named[name] for name in named if name not in matrices]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            lr=1.0,
            betas=(0.9, 0.95),
            eps=1e-3,
        )

    def predictions(
        self, token_ids: np.ndarray, temperature: float, routed: RoutedExperts | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of all tokens but the first, and the entropies."""
        logprobs, ids = self.vocabulary(token_ids, temperature, routed)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, ids[1:, None])[:, 0], entropies

    def vocabulary(
        self, token_ids: np.ndarray, temperature: float, routed: RoutedExperts | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the whole vocabulary before each token but the first; the ids."""
        self.forced.expert_ids = None if routed is None else routed.expert_ids
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        return (self.model(ids).logits[0, :-1] / temperature).log_softmax(-1), ids[0]

    def probe(self) -> Tensor:
        with torch.no_grad():
            return torch.cat([self.predictions(ids, 1.0)[0] for ids in probe(self.config)])

    def step(self, batch: Batch) -> dict[str, float]:
        algorithm = self.config.algorithm
        with torch.no_grad():
            before = {
                t.trajectory_id: [
                    self.predictions(one.token_ids, self.temperature(t), one.routed_experts)[0]
                    for one, _ in conversations(t)
                ]
                for t in batch.trajectories
            }
        advantages = batch_advantages(batch.trajectories, algorithm.advantage)
        groups = list(dict.fromkeys(t.group_id for t in batch.trajectories))
        share = len(groups) // algorithm.mini_batches
        totals, counts, norms = 0.0, 0, []
        rate = 1e-3 * min(1.0, (batch.step + 1) / 2)
        starts = [*range(0, len(groups), share)] * algorithm.epochs
        for start in starts:
            chosen = groups[start : start + share]
            self.forced.logits.clear()
            members = [
                self._tokens(one, old, advantages[t.trajectory_id] * share_of_branch)
                for t in batch.trajectories
                if t.group_id in chosen
                for (one, share_of_branch), old in zip(
                    conversations(t), before[t.trajectory_id], strict=True
                )
            ]
            count = sum(len(tokens.policy) for tokens in members)
            loss = self._aggregate([self._losses(tokens) for tokens in members])
            self.model.zero_grad()
            (loss + self._router_losses() / count).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item())
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            if self.muon is not None:
                self.muon.step(rate, weight_decay=0.01)
            totals, counts = totals + loss.item() * count, counts + count
        found = {"loss": totals / counts, "grad_norm": sum(norms) / len(norms)}
        if self.forced.forced:
            found["routing_difference"] = self.forced.differing / self.forced.forced
        self.forced.differing = self.forced.forced = 0
        return found

    def _router_losses(self) -> Tensor:
        """The losses of routers over all tokens of a micro batch, times the number of tokens."""
        settings, total = self.config.learner.transformer, torch.zeros(())
        if not any(name.endswith("_loss_coeff") for name in settings):
            return total
        for parts in self.forced.logits.values():
            logits = torch.cat(parts)
            total = (
                total + settings.get("moe_z_loss_coeff", 0.0) * logits.logsumexp(-1).square().sum()
            )
            if balance := settings.get("moe_aux_loss_coeff"):
                scores, top_k = logits.softmax(-1), self.model.config.num_experts_per_tok
                chosen = torch.zeros_like(scores).scatter(1, scores.topk(top_k).indices, 1.0)
                fractions = chosen.sum(0) / (top_k * len(scores))
                total = total + balance * scores.shape[1] * (fractions * scores.sum(0)).sum()
        return total

    def temperature(self, trajectory: Trajectory) -> float:
        """Nobody sampled the replies that are given: the distribution itself is to learn them."""
        return 1.0 if trajectory.is_given else self.config.sampling.temperature

    def _tokens(self, trajectory: Trajectory, before: Tensor, advantage: float) -> Tokens:
        mask = torch.from_numpy(trajectory.sampled_mask())[1:]
        routed = trajectory.routed_experts
        logprobs, ids = self.vocabulary(trajectory.token_ids, self.temperature(trajectory), routed)
        policy = logprobs.gather(1, ids[1:, None])[:, 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        behavior = torch.from_numpy(trajectory.behavior_logprobs.copy())
        if trajectory.is_given:
            # No correction applies: what is trained is taken for the policy that sampled it.
            behavior = policy[mask].detach()
        divergence = self._divergence(logprobs[mask], trajectory.reference)
        return Tokens(policy[mask], entropy[mask], before[mask], behavior, advantage, divergence)

    def _divergence(self, logprobs: Tensor, reference: ReferenceLogprobs | None) -> Tensor:
        """The divergence from the reference over its likely tokens and all others as one."""
        if reference is None:
            return torch.zeros(len(logprobs))
        ids = torch.from_numpy(reference.top_ids.astype(np.int64))
        is_likely = torch.zeros(logprobs.shape, dtype=torch.bool).scatter(1, ids, True)
        policy = logprobs.exp()
        rest = policy.masked_fill(is_likely, 0.0).sum(-1, keepdim=True)
        policy = torch.cat([policy.gather(1, ids), rest], dim=1)
        likely = torch.from_numpy(reference.top_logprobs.copy()).exp()
        known = torch.cat([likely, 1 - likely.sum(-1, keepdim=True)], dim=1)
        if self.config.algorithm.kl.estimator == "forward_top_k":
            return torch.nn.functional.kl_div(policy.log(), known, reduction="none").sum(-1)
        return torch.nn.functional.kl_div(known.log(), policy, reduction="none").sum(-1)

    def _losses(self, tokens: Tokens) -> Tensor:
        algorithm = self.config.algorithm
        if algorithm.loss == "reinforce":
            # The weight leads to the present policy; without one this is the likelihood times the
            # reward.
            present = dataclasses.replace(tokens, before=tokens.policy.detach())
            return -self._weight(present) * tokens.advantage * tokens.policy
        weight = self._weight(tokens)
        anchor = (
            tokens.behavior if algorithm.loss_args.get("ratio") == "behavior" else tokens.before
        )
        ratio = (tokens.policy - anchor).exp()
        low, high = 1 - algorithm.loss_args["clip_low"], 1 + algorithm.loss_args["clip_high"]
        advantage = tokens.advantage
        if algorithm.loss == "cispo":
            losses = -ratio.detach().clamp(low, high) * advantage * tokens.policy
        else:
            if algorithm.loss == "gspo":
                ratio = (tokens.policy - anchor).mean().exp().expand(len(anchor))
            losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        losses = losses + algorithm.kl.coefficient * tokens.divergence
        return weight * losses - algorithm.entropy_coefficient * tokens.entropy

    def _weight(self, tokens: Tokens) -> Tensor:
        algorithm, arguments = self.config.algorithm, self.config.algorithm.weight_args
        log_ratio = tokens.before - tokens.behavior
        if algorithm.weight == "none":
            return torch.ones_like(log_ratio)
        weight = log_ratio.exp()
        if algorithm.weight == "sequence":
            weight = log_ratio.sum().exp().expand(len(log_ratio))
        weight = weight.clamp(max=arguments["cap"])
        if "token_band" in arguments:
            low, high = arguments["token_band"]
            weight = weight * ((log_ratio.exp() >= low) & (log_ratio.exp() <= high))
        if "sequence_band" in arguments:
            low, high = arguments["sequence_band"]
            weight = weight * (low <= math.exp(log_ratio.mean()) <= high)
        return weight

    def _aggregate(self, losses: Sequence[Tensor]) -> Tensor:
        match self.config.algorithm.aggregation:
            case "token_mean":
                return torch.cat(list(losses)).mean()
            case "sequence_mean":
                return torch.stack([one.mean() for one in losses]).mean()
            case "fixed":
                length = self.config.sampling.max_reply_tokens
                return torch.cat(list(losses)).sum() / (len(losses) * length)


def conversations(trajectory: Trajectory) -> list[tuple[Trajectory, float]]:
    """Each branch as an episode by itself, and its share."""
    found = plain_algorithm.conversations(trajectory)
    return [(one, branch.share) for one, branch in found]


def batch_advantages(trajectories: Sequence[Trajectory], kind: str) -> dict[str, float]:
    """GRPO's, or REINFORCE++'s: the reward less the mean over all tokens, over their deviation."""
    found = {}
    every = np.concatenate([[t.reward] * t.num_sampled_tokens for t in trajectories])
    for t in trajectories:
        if kind == "score":
            found[t.trajectory_id] = t.reward
            continue
        rewards = np.array([o.reward for o in trajectories if o.group_id == t.group_id])
        against = every if kind == "reinforce_pp" else rewards
        found[t.trajectory_id] = (t.reward - against.mean()) / (against.std() + 1e-6)
    return found
