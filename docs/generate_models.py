"""Writes the tables of families and of Tinker's models in docs/guides/models.md.

Run `python docs/generate_models.py` in the repository root; a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tinker_line_up
from slipstream.core.models.families import FAMILIES, SLIDING, Family

PAGE = Path(__file__).parent / "guides" / "models.md"
# Parts of attention by the families that have them; no program asks for these by the record.
NORMED = (
    "Gemma3",
    "Qwen3",
    "Qwen3Moe",
    "Qwen3Next",
    "Qwen3_5",
    "Qwen3_5Moe",
    "Qwen3VL",
    "Qwen3VLMoe",
)
NORMED_WHOLE = ("MiniMaxM2", "Olmo2")
WITH_SINKS = ("GptOss",)
# What each setting that a family cannot have stands for.
TITLES = {
    "model.dtype": "float16",
    "learner.parallel.etp": "split experts",
    "lora.publish": "adapters apart",
}
BEGIN = "<!-- families -->\n"
END = "<!-- end of families -->"
BEGIN_LINE_UP = "<!-- line-up -->\n"
END_LINE_UP = "<!-- end of line-up -->"


def parts(family: Family) -> Iterator[str]:
    """Yields what differs from a plain dense decoder."""
    name = family.architecture.partition("For")[0]
    if "kv_lora_rank" in family.read:
        yield "latent attention"
    if family.is_delta:
        yield "delta nets"
    if family.has_windows:
        yield "windows by layer" if SLIDING in family.layer_kinds else "windows"
    if name in WITH_SINKS:
        yield "sinks"
    if name in NORMED:
        yield "normed heads"
    if name in NORMED_WHOLE:
        yield "norms over all heads"
    if family.experts is not None:
        yield "experts"
    if family.vision is not None:
        yield "images"
    if family.decoder_folder:
        yield "text alone"


def table() -> str:
    """Returns the table, a row for each family, and the reasons below it."""
    rows = ["| class | parts | `rope_type` | cannot have |", "|---|---|---|---|"]
    reasons: dict[str, None] = {}
    for name, family in FAMILIES.items():
        titles = ", ".join(TITLES[setting] for setting in family.cannot)
        kinds = "default" if family.rope.is_partial else ", ".join(family.rope.kinds) or "any"
        rows.append(f"| `{name}` | {', '.join(parts(family))} | {kinds} | {titles} |")
        for setting, reason in family.cannot.items():
            reasons[f"- {TITLES[setting]}: {reason}"] = None
    return "\n".join((*rows, "", *sorted(reasons))) + "\n"


def page(text: str) -> str:
    """Returns the page with the tables of now."""
    line_up = "\n".join(tinker_line_up.lines()) + "\n"
    text = _replaced(text, BEGIN, END, table())
    return _replaced(text, BEGIN_LINE_UP, END_LINE_UP, line_up)


def _replaced(text: str, begin: str, end: str, content: str) -> str:
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}{content}{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
