"""A training step on transformers and torch alone: one conversation after the other."""

import dataclasses
import functools
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from torch import Tensor

from support.ranks.parity_layouts import probe
from support.references.plain_algorithm import (
    TOP_ENTROPY,
    Conversation,
    aggregated,
    conversation_of,
    conversations,
    divergence,
    give_advantages,
    has_high_entropy,
    kept_sets,
    own_table,
    token_losses,
)
from support.references.plain_muon import PlainMuon

# A logit so low that its token has no chance, and its share of the entropy is a number.
NO_CHANCE = -1e30
# Classes of config.json that have another name in transformers.
OTHER_NAMES = {
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
}


class ForcedExperts:
    """Sends tokens to given experts in transformers' model, weighted as it weights its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.expert_ids: np.ndarray | None = None
        # Scores that routers gave trained sequences, [tokens, experts], by the place of the layer.
        self.logits: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.differing = 0
        self.forced = 0
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
        for token, expert_ids in enumerate(self.expert_ids[:, place].tolist()):
            if max(expert_ids) < gate.num_experts:
                if torch.is_grad_enabled():
                    self.differing += len(
                        set(expert_ids) - set(indices[token].tolist())
                    )
                    self.forced += len(expert_ids)
                indices[token] = torch.tensor(expert_ids)
        is_sigmoid = hasattr(gate, "e_score_correction_bias")
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
        weights = scores.gather(1, indices)
        # The scores of gpt-oss always add up to 1.
        scale = getattr(gate, "routed_scaling_factor", None)
        if getattr(gate, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * (scale or 1.0), indices


def plain_model(
    path: Path, dtype: torch.dtype = torch.float32, **changes: object
) -> Any:
    """transformers' model of a folder, with changes to its config.json."""
    import transformers

    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    # transformers has their class, but does not know the `model_type` of Kimi K2 and MiMo.
    kind = getattr(transformers, OTHER_NAMES.get(name, name))
    config = kind.config_class.from_pretrained(path)
    config.model_type = kind.config_class.model_type
    for field, value in changes.items():
        setattr(config.get_text_config(), field, value)
    options = {"dtype": dtype, "attn_implementation": "eager"}
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"
    return kind.from_pretrained(path, config=config, **options)


def adam_step(
    model: torch.nn.Module, loss: Tensor, rate: float, *, eps: float
) -> float:
    """Takes a step of AdamW without decay; returns the norm of the gradient, which stays."""
    optimizer = torch.optim.AdamW(
        model.parameters(), rate, betas=(0.9, 0.95), eps=eps, weight_decay=0.0
    )
    loss.backward()
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return float(torch.stack(squares).sum().sqrt())


def as_teacher_reads(one: Conversation) -> Conversation:
    """The same sampled tokens behind the prompt that the trajectory has for a teacher, if any."""
    episode = one.episode
    if not episode.teacher_prompt:
        return one
    prompt = np.frombuffer(episode.teacher_prompt, dtype="<u4")
    prompt_length, *lengths = episode.run_lengths
    token_ids = np.concatenate([prompt, episode.token_ids[prompt_length:]])
    taught = dataclasses.replace(
        episode,
        token_ids=token_ids,
        run_lengths=(len(prompt), *lengths),
        routed_experts=None,
    )
    return dataclasses.replace(one, episode=taught)


def teacher_of(config: Config, one: Conversation) -> str:
    """The name of the teacher of a conversation's environment; "" if none names it."""
    teachers = config.reference.teachers if config.reference is not None else {}
    names = [
        name
        for name, teacher in teachers.items()
        if one.episode.environment in teacher.environments
    ]
    return names[0] if names else ""


class PlainPolicy:
    """Unpacked, without parallelism, in float32, by the optimizer of the parity tests' settings."""

    max_norm = 1.0

    def __init__(self, path: Path, config: Config) -> None:
        self.config = config
        self.model = self._open(path)
        self.forced = ForcedExperts(self.model)
        # Speak in place of what trajectories say of a reference, by the names of teachers, with
        # "" for the environments that no teacher names.
        self.references: dict[str, PlainPolicy] = {}
        # Of each teacher the divergence from it at all trained tokens of the step.
        self.divergences: dict[str, list[Tensor]] = defaultdict(list)
        # The weights of each version that was trained.
        self.weights_of: dict[int, dict[str, Tensor]] = {}
        self.muon: PlainMuon | None = None
        self.optimizer = self._make_optimizer()

    def _open(self, path: Path) -> Any:
        return plain_model(path)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        parameters = dict(self.model.named_parameters())
        # Biases of all experts together are a matrix.
        matrices = {
            n for n, p in parameters.items() if p.dim() > 1 and not n.endswith("_bias")
        }
        if self.config.learner.optimizer.get("optimizer") == "muon":
            self.muon = PlainMuon(self.model, self.config.learner.optimizer)
            orthogonal = {p for parts in self.muon.matrices for p, _ in parts}
            parameters = {
                name: p for name, p in parameters.items() if p not in orthogonal
            }
        decayed = [parameters[name] for name in parameters if name in matrices]
        rest = [parameters[name] for name in parameters if name not in matrices]
        return torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.01},
                {"params": rest, "weight_decay": 0.0},
            ],
            lr=1.0,
            betas=(0.9, 0.95),
            eps=1e-3,
        )

    def probe(self) -> Tensor:
        self.forced.expert_ids = None
        with torch.no_grad():
            rows = [
                torch.from_numpy(ids.astype(np.int64)) for ids in probe(self.config)
            ]
            logprobs = [
                self.model(ids[None]).logits[0, :-1].log_softmax(-1) for ids in rows
            ]
        parts = zip(logprobs, rows, strict=True)
        return torch.cat([row.gather(1, ids[1:, None])[:, 0] for row, ids in parts])

    def step(self, batch: Batch) -> dict[str, float]:
        algorithm = self.config.algorithm
        members = [
            conversation_of(trajectory, sequence, branch, self.config)
            for trajectory in batch.trajectories
            for sequence, branch in conversations(trajectory)
        ]
        weights = self.model.state_dict()
        self.weights_of[batch.step] = {
            name: value.clone() for name, value in weights.items()
        }
        with torch.no_grad():
            for sequence in members:
                self._estimate(sequence)
            if algorithm.weight == "split":
                for version in sorted(self.weights_of):
                    self._score(members, version)
                self.model.load_state_dict(self.weights_of[batch.step])
        give_advantages(members)
        groups = list(dict.fromkeys(sequence.episode.group_id for sequence in members))
        share = len(groups) // algorithm.mini_batches
        losses = []
        counts = []
        norms = []
        for start in [*range(0, len(groups), share)] * algorithm.epochs:
            group_ids = groups[start : start + share]
            mini_batch = [
                sequence
                for sequence in members
                if sequence.episode.group_id in group_ids
            ]
            loss, norm = self._gradients(mini_batch)
            self._update(1e-3 * min(1.0, (batch.step + 1) / 2))
            counts.append(sum(sequence.num_trained for sequence in mini_batch))
            losses.append(loss * counts[-1])
            norms.append(norm)
        metrics = {
            "loss": sum(losses) / max(1, sum(counts)),
            "grad_norm": sum(norms) / len(norms),
        }
        for name, estimates in self.divergences.items():
            metrics[f"teacher/{name}/kl_reference"] = torch.cat(estimates).mean().item()
        self.divergences.clear()
        if self.forced.forced:
            metrics["routing_difference"] = self.forced.differing / self.forced.forced
        self.forced.differing = self.forced.forced = 0
        return metrics

    def _predictions(self, one: Conversation) -> Tensor:
        """Log-probabilities of the vocabulary in place of each sampled token.

        Tokens that were left out when it was drawn have no chance.
        """
        routed = one.episode.routed_experts
        self.forced.expert_ids = None if routed is None else routed.expert_ids
        ids = torch.from_numpy(one.episode.token_ids.astype(np.int64))[None]
        # Replies that are given were sampled by nobody: the distribution itself is to learn them.
        entry = own_table(self.config, one.episode.environment)
        temperature = entry.get("temperature", self.config.sampling.temperature)
        if one.episode.is_given:
            temperature = 1.0
        logits = self.model(ids).logits[0, one.places - 1] / temperature
        for place, token_ids in enumerate(kept_sets(one.episode)):
            if token_ids:
                is_left_out = torch.ones(logits.shape[1], dtype=torch.bool)
                is_left_out[token_ids] = False
                logits[place] = logits[place].masked_fill(is_left_out, NO_CHANCE)
        return logits.log_softmax(-1)

    def _score(self, members: Sequence[Conversation], version: int) -> None:
        """Notes what the weights of a version say of the tokens that they sampled."""
        self.model.load_state_dict(self.weights_of[version])
        for one in members:
            spans = one.episode.version_spans
            steps = np.repeat(
                [s.version.step for s in spans], [s.length for s in spans]
            )
            logprobs = self._predictions(one).gather(1, one.targets[:, None])[:, 0]
            is_of_version = torch.from_numpy(steps == version)
            before = one.versions if len(one.versions) else torch.zeros_like(logprobs)
            one.versions = torch.where(is_of_version, logprobs, before)

    def _estimate(self, one: Conversation) -> None:
        """Notes what the policy before the step and the reference say."""
        one.before = self._predictions(one).gather(1, one.targets[:, None])[:, 0]
        reference = self.references.get(teacher_of(self.config, one))
        if reference is not None:
            reference_logprobs = reference._predictions(as_teacher_reads(one))
            one.reference = reference_logprobs.gather(1, one.targets[:, None])[:, 0]
            one.likely, one.likely_ids = reference_logprobs.topk(
                self.config.reference.top_k or 1
            )

    def _gradients(self, members: Sequence[Conversation]) -> tuple[float, float]:
        """Returns the loss of the tokens and the norm of all gradients, which are clipped to it."""
        self.forced.logits.clear()
        predictions = [self._predictions(sequence) for sequence in members]
        trained = {
            place: token_losses(sequence, predictions[place])
            for place, sequence in enumerate(members)
            if sequence.num_trained
        }
        for place in trained:
            one = members[place]
            if name := teacher_of(self.config, one):
                policy = predictions[place].detach().gather(1, one.targets[:, None])
                estimates = divergence(policy[:, 0], one.reference, "k3")
                self.divergences[name].append(estimates)
        algorithm = self.config.algorithm
        if algorithm.loss == TOP_ENTROPY:
            of_loss = {
                place: predictions[place]
                for place in trained
                if members[place].algorithm.loss == TOP_ENTROPY
            }
            for place, mask in has_high_entropy(
                of_loss, algorithm.loss_args["share"]
            ).items():
                trained[place] = trained[place] * mask
        for place, losses in trained.items():
            episode = members[place].episode
            entry = own_table(self.config, episode.environment)
            weight = entry.get("loss_weight", 1.0)
            trained[place] = losses * weight
        self.model.zero_grad()
        loss = torch.zeros(())
        if trained:
            loss = aggregated(list(trained.values()), self.config, number=len(members))
            (loss + self._router_losses() / sum(map(len, trained.values()))).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        return loss.item(), norm.item()

    def _update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.muon is not None:
            self.muon.step(rate, weight_decay=0.01)

    def _router_losses(self) -> Tensor:
        """The losses of routers over all tokens of a micro batch, times the number of tokens."""
        settings = self.config.learner.transformer
        total = torch.zeros(())
        for parts in self.forced.logits.values():
            logits = torch.cat(parts)
            if coefficient := settings.get("moe_z_loss_coeff"):
                total = total + coefficient * logits.logsumexp(-1).square().sum()
            if balance := settings.get("moe_aux_loss_coeff"):
                scores = logits.softmax(-1)
                top_k = self.model.config.num_experts_per_tok
                is_chosen = torch.zeros_like(scores).scatter(
                    1, scores.topk(top_k).indices, 1.0
                )
                fractions = is_chosen.sum(0) / (top_k * len(scores))
                total = (
                    total
                    + balance * scores.shape[1] * (fractions * scores.sum(0)).sum()
                )
        return total


class PlainStep(PlainPolicy):
    """In float64, by plain gradient descent without a limit of the gradients' norm."""

    max_norm = torch.inf

    def _open(self, path: Path) -> Any:
        # The default kernels of transformers do not know float64.
        return plain_model(path, torch.float64)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        rate = self.config.algorithm.learning_rate
        return torch.optim.SGD(self.model.parameters(), lr=rate)

    def _update(self, rate: float) -> None:
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights by the names of files, in which each expert has its own."""
        weights = {}
        for name, tensor in self.model.state_dict().items():
            if name.endswith(".experts.gate_up_proj"):
                for expert, both in enumerate(tensor):
                    for part, half in zip(
                        ("gate_proj", "up_proj"), both.chunk(2), strict=True
                    ):
                        weights[
                            name.replace("gate_up_proj", f"{expert}.{part}.weight")
                        ] = half
            elif name.endswith(".experts.down_proj"):
                for expert, down in enumerate(tensor):
                    weights[name.replace("down_proj", f"{expert}.down_proj.weight")] = (
                        down
                    )
            else:
                weights[name] = tensor
        return {name: tensor.clone() for name, tensor in weights.items()}
