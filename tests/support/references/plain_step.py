"""A training step on transformers and torch alone, in float64: one conversation after the other."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from torch import Tensor

from support.references.plain_algorithm import (
    Conversation,
    aggregated,
    conversation_of,
    conversations,
    give_advantages,
    token_losses,
)


class PlainStep:
    """Trains a model unpacked, without parallelism, by plain gradient descent."""

    def __init__(self, path: Path, config: Config) -> None:
        from transformers import AutoModelForCausalLM

        self.config = config
        # The default kernels of transformers do not know float64.
        kernels = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **kernels)
        # What routers say in each layer of a mini-batch, for the loss that balances experts.
        self._router_logits: list[tuple[Tensor, ...]] = []
        self._balance = 0.0
        if hasattr(self.model.config, "num_experts_per_tok"):
            self._balance = config.learner.transformer.get("moe_aux_loss_coeff", 0.0)
        self.reference: PlainStep | None = None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.algorithm.learning_rate)

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights by the names of files, in which each expert has its own."""
        found = {}
        for name, tensor in self.model.state_dict().items():
            if name.endswith(".experts.gate_up_proj"):
                for expert, both in enumerate(tensor):
                    for part, own in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                        found[name.replace("gate_up_proj", f"{expert}.{part}.weight")] = own
            elif name.endswith(".experts.down_proj"):
                for expert, down in enumerate(tensor):
                    found[name.replace("down_proj", f"{expert}.down_proj.weight")] = down
            else:
                found[name] = tensor
        return {name: tensor.clone() for name, tensor in found.items()}

    def step(self, batch: Batch) -> dict[str, float]:
        algorithm = self.config.algorithm
        members = [
            conversation_of(whole, one, branch, self.config)
            for whole in batch.trajectories
            for one, branch in conversations(whole)
        ]
        with torch.no_grad():
            for one in members:
                self._estimate(one)
        give_advantages(members)
        groups = list(dict.fromkeys(one.episode.group_id for one in members))
        share = len(groups) // algorithm.mini_batches
        losses, counts, norms = [], [], []
        for start in [*range(0, len(groups), share)] * algorithm.epochs:
            chosen = groups[start : start + share]
            mini_batch = [one for one in members if one.episode.group_id in chosen]
            loss, norm = self._update(mini_batch)
            counts.append(sum(one.num_trained for one in mini_batch))
            losses.append(loss * counts[-1])
            norms.append(norm)
        return {"loss": sum(losses) / max(1, sum(counts)), "grad_norm": sum(norms) / len(norms)}

    def _predictions(self, one: Conversation) -> Tensor:
        """Log-probabilities of the whole vocabulary in place of each sampled token."""
        ids = torch.from_numpy(one.episode.token_ids.astype(np.int64))[None]
        found = self.model(ids, **({"output_router_logits": True} if self._balance else {}))
        if self._balance:
            self._router_logits.append(found.router_logits)
        # No policy sampled a given reply.
        temperature = 1.0 if one.episode.is_given else self.config.sampling.temperature
        return (found.logits[0, one.places - 1] / temperature).log_softmax(-1)

    def _estimate(self, one: Conversation) -> None:
        """Notes what the policy before the step and the reference say."""
        one.before = self._predictions(one).gather(1, one.targets[:, None])[:, 0]
        if self.reference is not None:
            known = self.reference._predictions(one)
            one.reference = known.gather(1, one.targets[:, None])[:, 0]
            assert self.config.reference is not None
            one.likely, one.likely_ids = known.topk(self.config.reference.top_k or 1)

    def _update(self, members: Sequence[Conversation]) -> tuple[float, float]:
        """Returns the loss of the tokens and the norm of all gradients."""
        self._router_logits.clear()
        predictions = [self._predictions(one) for one in members]
        trained = {
            place: token_losses(one, predictions[place])
            for place, one in enumerate(members)
            if one.num_trained
        }
        self.optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        if trained:
            loss = aggregated(list(trained.values()), self.config, number=len(members))
            (loss + self._balancing(sum(map(len, trained.values())))).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), torch.inf)
        self.optimizer.step()
        return loss.item(), norm.item()

    def _balancing(self, num_trained: int) -> Tensor:
        """The auxiliary loss of routers over all tokens of one micro batch, as Megatron has it."""
        total = torch.zeros((), dtype=torch.float64)
        for layer in zip(*self._router_logits, strict=True):
            scores = torch.cat(layer).double().softmax(-1)
            num_tokens, num_experts = scores.shape
            top_k = self.model.config.num_experts_per_tok
            chosen = torch.zeros_like(scores).scatter(1, scores.topk(top_k).indices, 1.0)
            product = (scores.sum(0) * chosen.sum(0)).sum() * num_experts / top_k / num_tokens**2
            total = total + product * num_tokens / num_trained
        return self._balance * total
