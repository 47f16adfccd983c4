"""benchmarks/rounding.py on a tiny model with delta nets."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from family_shapes import make_family  # noqa: E402
from rounding import chosen, decoded  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


@torch.no_grad()
def test_tokens_one_after_the_other_are_scored_as_all_at_once_until_states_change(
    tmp_path: Path,
) -> None:
    made = make_family(tmp_path / "model", "qwen3-next", tiny=True)
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    tokens = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(1))
    whole = chosen(model(tokens).logits[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(decoded(model, tokens, lambda state: state), whole)
    forgotten = decoded(model, tokens, torch.zeros_like)
    torch.testing.assert_close(forgotten[:, 0], whole[:, 0])
    assert (forgotten - whole)[:, 1:].abs().min() > 0
