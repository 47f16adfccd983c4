"""A client's passes and steps equal plain PyTorch, in every layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.fakes.parity_models import VOCAB
from support.ranks import pass_ranks
from support.ranks.pass_ranks import ADAM, LAYOUTS, LOSSES, passes_of
from support.ranks.rank_pool import RankPool
from torch import Tensor

NUM_LAYERS = 2
pytestmark = [pytest.mark.usefixtures("one_thread")]
# Every loss in one process, and one loss in each other layout.
JOBS = {f"one {loss}": 1 for loss in LOSSES}
JOBS |= {f"{layout} ppo": LAYOUTS[layout][0] for layout in LAYOUTS if layout != "one"}
# The places of the reports of the two passes, of the forward pass and of the bad ones.
FIRST, AGAIN, FORWARD, BAD, LONG, OVERFLOW, RAISES, UNKNOWN, SECOND = range(9)


@pytest.fixture(scope="module")
def found(folder: Path, rank_pool: RankPool) -> dict[str, dict]:
    return rank_pool.found(pass_ranks, JOBS, folder)


def loss_of(
    name: str, policy: Tensor, behavior: Tensor, worth: Tensor, in_ratio: Tensor
) -> Tensor:
    """The sum of the loss by its formula."""
    ratio = (policy - behavior).exp()
    clipped = ratio.clamp(0.9, 1.3)
    match name:
        case "cross_entropy":
            terms = -policy * worth
        case "importance_sampling":
            terms = -ratio * worth
        case "ppo":
            terms = -torch.minimum(ratio * worth, clipped * worth)
        case "cispo":
            terms = -clipped.detach() * worth * policy
        case "gspo":
            mean = (policy - behavior).detach()[in_ratio].mean()
            ratio = (mean + policy - policy.detach()).exp()
            terms = -torch.minimum(ratio * worth, ratio.clamp(0.9, 1.3) * worth)
        case _:
            terms = -(policy * worth - 0.15 * (policy - behavior) ** 2)
    return terms.sum()


class Plain:
    """The model of a folder in float64, and Adam by its formula."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        load = AutoModelForCausalLM.from_pretrained
        self.model = load(
            folder / "llama", dtype=torch.float64, attn_implementation="eager"
        )
        self._moments = {
            n: [torch.zeros_like(p)] * 2 for n, p in self.model.named_parameters()
        }
        self._steps = 0

    def forward(self, one) -> list[Tensor]:
        """The log-probabilities of the targets of each sequence of a pass."""
        rows = []
        for sequence in one.sequences:
            tokens, targets = (
                torch.from_numpy(np.frombuffer(data, "<u4").astype(np.int64))
                for data in (sequence.token_ids, sequence.targets)
            )
            logits = self.model(tokens[None]).logits[0, :, :VOCAB]
            rows.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
        return rows

    def loss(self, name: str, one, rows: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for sequence, row in zip(one.sequences, rows, strict=True):
            behavior, worth = (
                torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float64))
                for data in (sequence.behavior_logprobs, sequence.advantages)
            )
            in_ratio = worth != 0
            if sequence.ratio_mask:
                in_ratio = torch.from_numpy(
                    np.frombuffer(sequence.ratio_mask, np.bool_).copy()
                )
            total = total + loss_of(name, row, behavior, worth, in_ratio)
        return total

    @torch.no_grad()
    def step(self, numbers) -> float:
        """Updates the weights by the summed gradients; returns their norm."""
        parameters = dict(self.model.named_parameters())
        self._steps += 1
        norm = float(sum(p.grad.square().sum() for p in parameters.values()).sqrt())
        scale = min(1.0, numbers.max_grad_norm / norm) if numbers.max_grad_norm else 1.0
        betas = (numbers.beta1, numbers.beta2)
        for name, parameter in parameters.items():
            gradient = parameter.grad * scale
            first, second = self._moments[name]
            first = betas[0] * first + (1 - betas[0]) * gradient
            second = betas[1] * second + (1 - betas[1]) * gradient**2
            self._moments[name] = [first, second]
            # Norms do not decay.
            decay = numbers.weight_decay if parameter.dim() > 1 else 0.0
            parameter.mul_(1 - numbers.learning_rate * decay)
            mean = first / (1 - betas[0] ** self._steps)
            square = second / (1 - betas[1] ** self._steps)
            parameter.sub_(numbers.learning_rate * mean / (square.sqrt() + numbers.eps))
            parameter.grad = None
        return norm


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict]]:
    """What plain PyTorch computes for each loss, step by step."""
    found = {}
    for loss in LOSSES:
        plain = Plain(folder)
        steps = []
        for number, numbers in enumerate(ADAM):
            passes = passes_of(loss, number)
            rows = [plain.forward(sequence_pass) for sequence_pass in passes]
            totals = [
                plain.loss(loss, sequence_pass, r)
                for sequence_pass, r in zip(passes, rows, strict=True)
            ]
            sum(totals).backward()
            steps.append(
                {
                    "logprobs": [
                        [row.detach() for row in rows_of_pass] for rows_of_pass in rows
                    ],
                    "losses": [float(total.detach()) for total in totals],
                    "grad_norm": plain.step(numbers),
                    "weights": {
                        n: p.clone().detach() for n, p in plain.model.named_parameters()
                    },
                }
            )
        found[loss] = steps
    return found


@pytest.mark.parametrize("job", JOBS)
def test_log_probabilities_and_losses_are_those_of_plain_pytorch(job, found, expected):
    for ours, theirs in zip(found[job]["steps"], expected[job.split()[1]], strict=True):
        for place, number in ((FIRST, 0), (FORWARD, 0), (SECOND, 1)):
            for our_logprobs, plain in zip(
                ours["logprobs"][place], theirs["logprobs"][number], strict=True
            ):
                torch.testing.assert_close(
                    our_logprobs.double(), plain, rtol=0, atol=1e-5
                )
            assert ours["losses"][place] == pytest.approx(
                theirs["losses"][number], rel=1e-4
            )


@pytest.mark.parametrize("job", JOBS)
def test_steps_take_the_sum_of_gradients_and_their_own_numbers_of_adam(
    job, found, expected
):
    for ours, theirs in zip(found[job]["steps"], expected[job.split()[1]], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for name, weight in ours["weights"].items():
            plain = theirs["weights"][name][: weight.shape[0]]
            torch.testing.assert_close(weight.double(), plain, rtol=0, atol=2e-5)
    assert not torch.equal(
        *(found[job]["steps"][n]["weights"]["lm_head.weight"] for n in (0, 1))
    )


@pytest.mark.parametrize("job", JOBS)
def test_a_pass_counts_once_and_a_faulty_one_not_at_all(
    job: str, found: dict[str, dict]
) -> None:
    for step in found[job]["steps"]:
        assert step["losses"][AGAIN] == step["losses"][FIRST]
        faulty = {BAD, LONG, OVERFLOW, RAISES, UNKNOWN}
        assert {place for place, error in enumerate(step["errors"]) if error} == faulty
        assert "does not fit learner.micro_batch_tokens" in step["errors"][LONG]
        assert "loss ppo at pass overflow: RuntimeError" in step["errors"][OVERFLOW]
        assert "this loss has seen the mark" in step["errors"][RAISES]
        assert "import of none_such in" in step["errors"][UNKNOWN]
        assert f"has token {VOCAB}, the vocabulary has {VOCAB}" in step["errors"][BAD]
    # A step without a pass has no gradient.
    assert found[job]["empty"] == 0.0


@pytest.mark.parametrize("job", JOBS)
def test_a_new_beginning_is_the_first_one_to_the_bit(
    job: str, found: dict[str, dict]
) -> None:
    seen = found[job]
    for name, weight in seen["before"].items():
        assert torch.equal(seen["begun"][name], weight)
        assert torch.equal(seen["again"][name], seen["steps"][0]["weights"][name])
