"""Runs that send servers the adapters alone, and what must be seen of them."""

import json
from pathlib import Path

from slipstream.learner.trainer.tiny_model import SPECIAL_TOKENS, WORDS

from support.rigs.run_processes import rows_of, summary_of

RANK = 8
LAYERS = 2
# What `make_model_folder` makes: 2 heads and one pair of keys and values of 32.
HIDDEN, MLP, HEADS, KEYS = 64, 192, 64, 32
# Outputs and inputs of the seven matrices of a layer.
MATRICES = [
    (HEADS, HIDDEN),
    (KEYS, HIDDEN),
    (KEYS, HIDDEN),
    (HIDDEN, HEADS),
    (MLP, HIDDEN),
    (MLP, HIDDEN),
    (HIDDEN, MLP),
]
ADAPTERS = LAYERS * sum(RANK * (outputs + inputs) for outputs, inputs in MATRICES)
VOCABULARY = len(SPECIAL_TOKENS) + len(WORDS)
ALL = (
    2 * VOCABULARY * HIDDEN
    + LAYERS * (sum(outputs * inputs for outputs, inputs in MATRICES) + 2 * HIDDEN)
    + HIDDEN
)
LORA = {"rank": RANK, "alpha": 32.0, "publish": "adapters"}


def check(run: Path, *, item_bytes: int, whole: int, gap: float) -> dict:
    """Returns the summary; `whole` publishes had matrices and adapters, the others adapters."""
    summary, rows = summary_of(run), [row for row in rows_of(run) if "weights_bytes" in row]
    alone, both = ADAPTERS * item_bytes, (ALL + ADAPTERS) * item_bytes
    assert {row["weights_bytes"] for row in rows} <= {alone, both}
    expected = whole * both + (summary["publishes"] - whole) * alone
    assert summary["published_bytes"] == expected, (summary["publishes"], whole)
    assert summary["publishes"] > 2
    assert summary["publishes_verified"] >= whole
    assert summary["probe_gap_max"] <= gap
    assert summary["logprob_gap_mean"] <= gap
    print(json.dumps({name: summary[name] for name in ("publishes", "published_bytes")}))
    return summary
