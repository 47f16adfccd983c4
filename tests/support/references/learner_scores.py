"""How far an engine's log-probabilities are from those that the learner would compute."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Gaps:
    """Gaps of the probe, in nats, and mean differences of log-probabilities."""

    # To the weights that the engine was sent.
    own: float
    own_mean: float
    # To other weights.
    other: float


def gaps_of(
    folder: Path, report: dict[str, list[dict[str, Any]]], *, device: str
) -> Gaps:
    """Compares the scores that `receiver_rig.py` reports with transformers in bfloat16."""
    from slipstream.learner.controller.publishing.totals import logit_gap

    (scored,) = report["scored"]
    got = np.asarray(scored["logprobs"], dtype=np.float32)
    own_scores = _scores(folder, scored["weights"], device)
    return Gaps(
        own=logit_gap(own_scores, got),
        own_mean=float(np.abs(own_scores - got).mean()),
        other=logit_gap(_scores(folder, "c", device), got),
    )


def _scores(folder: Path, label: str, device: str) -> np.ndarray:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from support.rigs.receiver_rig import SEQUENCES

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.load_state_dict(
        load_file(folder / "sent" / f"{label}.safetensors"), strict=False
    )
    model.tie_weights()
    model.to(device).eval()
    scores = []
    with torch.no_grad():
        for sequence in SEQUENCES:
            logits = (
                model(torch.tensor([sequence], device=device)).logits[0, :-1].float()
            )
            targets = torch.tensor(sequence[1:], device=device)[:, None]
            scores.append(logits.log_softmax(-1).gather(1, targets)[:, 0].cpu().numpy())
    return np.concatenate(scores)
