"""What bfloat16 alone costs a family of models: transformers beside itself, without our code.

The gap that benchmarks/families.py finds between learner and server cannot be smaller than this.
A random model at true width scores the same random tokens in float32, in bfloat16, and in bfloat16
token by token, as a server does. States of delta nets are float32 there; the last column rounds
them after each token, as vLLM does where nothing else is asked for.

    python benchmarks/rounding.py qwen3 qwen3-next     # on a CPU, some minutes

Prints one table of mean absolute differences of log-probabilities.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from family_shapes import FAMILIES, make_family
from measure import progress, table
from transformers import AutoModelForCausalLM

SEQUENCES, TOKENS = 8, 40
HEADER = ["family", "from float32", "token by token", "and with states rounded"]


def chosen(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the log-probabilities of `tokens` [sequences, length] by [.., length, words]."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def decoded(
    model: Any,  # noqa: ANN401 - a model of transformers
    tokens: torch.Tensor,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns the log-probabilities of all tokens but the first, computed one after the other.

    `change` is applied to the states of delta nets after each token.
    """
    found, cache = [], None
    for place in range(tokens.shape[1] - 1):
        said = model(tokens[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = said.past_key_values
        for layer in cache.layers:
            states = getattr(layer, "recurrent_states", {})
            states.update({key: change(state) for key, state in states.items()})
        found.append(chosen(said.logits[:, -1], tokens[:, place + 1]))
    return torch.stack(found, 1)


@torch.no_grad()
def row(name: str, folder: Path) -> list[str]:
    """Returns the line of one family."""
    made = make_family(folder / name, name, tiny=False)

    def load(dtype: torch.dtype) -> Any:  # noqa: ANN401
        return AutoModelForCausalLM.from_pretrained(made, dtype=dtype).eval()

    model = load(torch.float32)
    generator = torch.Generator().manual_seed(0)
    words = model.config.vocab_size
    tokens = torch.randint(3, words, (SEQUENCES, TOKENS), generator=generator)
    exact = chosen(model(tokens).logits[:, :-1], tokens[:, 1:])
    del model
    model = load(torch.bfloat16)
    whole = chosen(model(tokens).logits[:, :-1], tokens[:, 1:])
    single = decoded(model, tokens, lambda state: state)
    rounded = decoded(model, tokens, lambda state: state.bfloat16().to(state.dtype))
    gaps = [whole - exact, single - whole, rounded - whole]
    return [name, *(f"{gap.abs().mean():.3f}" for gap in gaps)]


def main() -> None:
    """Measures the families one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("families", nargs="+", choices=list(FAMILIES))
    arguments = parser.parse_args()
    rows = []
    for name in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, Path(folder)))
        progress(" ".join(rows[-1]))
    print("\n".join(table(HEADER, rows)))


if __name__ == "__main__":
    main()
