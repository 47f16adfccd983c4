"""The program of ranks that carry out a client's passes and steps.

What a job saw lies in FOLDER/JOB.pt afterwards; the test computes the same with plain PyTorch.
"""

import functools
import json
from pathlib import Path

import numpy as np
import torch
from slipstream.core.settings.config import Config
from slipstream.learner.algorithms.inputs import LossInputs
from slipstream.v1 import trainer_pb2 as pb
from torch import Tensor

from support.fakes.parity_models import VOCAB
from support.ranks.rank_program import kept, opened, settings_of, weights_of

OWN = "slipstream.extensions.tinker.trainer"
MARKED = 12345.0
# name -> (loss, its arguments)
LOSSES: dict[str, tuple[str, dict[str, float | str]]] = {
    "cross_entropy": ("reinforce", {}),
    "importance_sampling": (f"{OWN}:importance_sampling", {}),
    "ppo": ("ppo", {"ratio": "behavior", "clip_low": 0.1, "clip_high": 0.3}),
    "cispo": ("cispo", {"ratio": "behavior", "clip_low": 0.1, "clip_high": 0.3}),
    "gspo": ("gspo", {"ratio": "behavior", "clip_low": 0.1, "clip_high": 0.3}),
    "dro": (f"{OWN}:dro", {"beta": 0.3}),
}
# Three steps: the second has other numbers, and the third a gradient that is cut.
ADAM = (
    pb.AdamNumbers(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-3),
    pb.AdamNumbers(
        learning_rate=0.02, beta1=0.8, beta2=0.9, eps=1e-2, weight_decay=0.1
    ),
    pb.AdamNumbers(
        learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-3, max_grad_norm=0.05
    ),
)
# name -> (ranks, changes of the learner)
LAYOUTS: dict[str, tuple[int, dict]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2-distributed": (2, {"ddp": {"use_distributed_optimizer": True}}),
    "cp2": (2, {"parallel": {"cp": 2}}),
    "tp2": (2, {"parallel": {"tp": 2}, "transformer": {"sequence_parallel": False}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
}


def config_of(layout: str, folder: Path) -> Config:
    ranks, changes = LAYOUTS[layout]
    settings = {"world_size": ranks, "micro_batch_tokens": 48}
    return settings_of(folder / "llama", {"learner": settings | changes})


def passes_of(loss: str, step: int) -> list[pb.Pass]:
    """Two passes of sequences whose targets are not all the tokens that follow."""
    random = np.random.default_rng(step)
    name, arguments = LOSSES[loss]
    passes = []
    for number in range(2):
        sequences = []
        for length in (7, 12, 1, 20):
            tokens = random.integers(0, VOCAB, length + 1)
            tokens[-1] = random.integers(0, VOCAB)
            advantages = random.normal(size=length)
            if loss == "gspo":
                # Tokens of a prompt, whose log-probabilities are no part of the sequence's ratio.
                advantages[: length // 3] = 0.0
            sequences.append(
                pb.PassSequence(
                    token_ids=tokens[:-1].astype("<u4").tobytes(),
                    targets=tokens[1:].astype("<u4").tobytes(),
                    advantages=advantages.astype("<f4").tobytes(),
                    behavior_logprobs=random.normal(-3.5, 0.3, length)
                    .astype("<f4")
                    .tobytes(),
                )
            )
            if loss == "gspo" and number:
                # Sampled tokens without an advantage belong to the ratio, too.
                mask = np.arange(length) >= length // 4
                sequences[-1].ratio_mask = mask.tobytes()
        passes.append(
            pb.Pass(
                id=f"{loss}-{step}-{number}",
                backward=True,
                loss=name,
                loss_args_json=json.dumps(arguments),
                sequences=sequences,
            )
        )
    return passes


def raising(tokens: LossInputs) -> Tensor:
    """A client's loss that raises where it sees the marked advantage."""
    if MARKED in tokens.advantages:
        raise RuntimeError("this loss has seen the mark")
    return -tokens.logprobs * tokens.advantages


def _no_load(step: int, chosen: object) -> None:
    raise AssertionError(f"no step loads version {step}")


def run_rank(folder: Path, job: str) -> None:
    """What every rank of a job, "LAYOUT LOSS", does."""
    from slipstream.learner.trainer.batches.batch import Batch
    from slipstream.learner.trainer.opening import load_start
    from slipstream.learner.trainer.passes import Passes

    layout, loss = job.split()
    config = config_of(layout, folder)
    policy = opened(config)
    begin_again = functools.partial(load_start, policy, config)
    passes = Passes(policy, _no_load, begin_again)
    before = weights_of(policy)
    steps = []
    for step, numbers in enumerate(ADAM):
        passes_of_step = passes_of(loss, step)
        forward = pb.Pass()
        forward.CopyFrom(passes_of_step[0])
        forward.id = "forward"
        forward.backward = False
        bad = pb.Pass(
            id="bad",
            backward=True,
            loss="reinforce",
            sequences=passes_of_step[0].sequences,
        )
        bad.sequences[0].targets = np.full(7, VOCAB, dtype="<u4").tobytes()
        # No micro batch has room for it, and it comes when gradients are held.
        tokens, zeros = (
            np.zeros(127, dtype=dtype).tobytes() for dtype in ("<u4", "<f4")
        )
        sequence = pb.PassSequence(token_ids=tokens, targets=tokens, advantages=zeros)
        long = pb.Pass(id="long", backward=True, loss="reinforce", sequences=[sequence])
        # The clipping function of torch refuses a number that float32 does not hold.
        overflow = pb.Pass(
            id="overflow",
            backward=True,
            loss="ppo",
            sequences=passes_of_step[0].sequences,
        )
        overflow.loss_args_json = json.dumps({"ratio": "behavior", "clip_high": 1e308})
        # The loss fails at one sequence: other ranks see nothing of it.
        raises = pb.Pass(
            id="raises", backward=True, sequences=passes_of_step[0].sequences
        )
        raises.loss = "support.ranks.pass_ranks:raising"
        raises.sequences[2].advantages = np.full(1, MARKED, "<f4").tobytes()
        unknown = pb.Pass(id="unknown", backward=True, loss="none_such")
        unknown.sequences.extend(passes_of_step[0].sequences)
        order = (
            passes_of_step[0],
            passes_of_step[0],
            forward,
            bad,
            long,
            overflow,
            raises,
            unknown,
            passes_of_step[1],
        )
        reports = [passes.compute(client_pass) for client_pass in order]
        batch = Batch(
            step, f"b{step}", (), pb.GivenStep(adam=numbers), tuple(passes_of_step)
        )
        if step == 1:
            # A restart has lost the gradients.
            passes = Passes(policy, _no_load, begin_again)
        metrics = passes.run(batch).metrics
        steps.append(
            {
                "logprobs": [
                    [
                        torch.frombuffer(bytearray(logprob), dtype=torch.float32)
                        for logprob in r.logprobs
                    ]
                    for r in reports
                ],
                "losses": [r.metrics.get("loss:sum", 0.0) for r in reports],
                "errors": [r.error for r in reports],
                "grad_norm": metrics["grad_norm"],
                "weights": weights_of(policy),
            }
        )
    empty = Batch(3, "b3", (), pb.GivenStep(adam=ADAM[0]), ())
    norm = passes.run(empty).metrics["grad_norm"]
    begin = pb.GivenStep(begin=pb.NewAdapter())
    passes.run(Batch(4, "b4", (), begin, ()))
    weights_at_start = weights_of(policy)
    # Adam's moments are gone, too: the first step comes out as it did before.
    first_passes = tuple(passes_of(loss, 0))
    for order in first_passes:
        passes.compute(order)
    first_step = pb.GivenStep(adam=ADAM[0])
    again = Batch(5, "b5", (), first_step, first_passes)
    passes.run(again)
    seen = {"before": before, "steps": steps, "empty": norm}
    seen |= {"begun": weights_at_start}
    kept(policy, seen | {"again": weights_of(policy)}, folder / f"{job}.pt")
