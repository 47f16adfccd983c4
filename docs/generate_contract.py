"""Writes docs/guides/tinker-contract.md, a row for each field of the SDK, from the server's table.

Run `python docs/generate_contract.py` in the repository root; a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from slipstream.extensions.tinker.contract import (
    COOKBOOK,
    LOSS_INPUTS,
    MESSAGES,
    REQUESTS,
    REQUIRED,
    SDK,
    UNREAD,
    UNSERVED,
    Field,
    Use,
)
from slipstream.extensions.tinker.requested_passes import LOSSES, UNPUBLISHED

PAGE = Path(__file__).parent / "guides" / "tinker-contract.md"
HEAD = f"""# Tinker's contract, field by field

[`slipstream tinker`](own-loop.md) speaks the wire of {SDK} (November 2026), which
{COOKBOOK} uses. The tables have every field of its requests, with the SDK's default. The last
column says for what a field is read; if it is refused, the line that any other value than the
default gets; and if it has no effect, why. A field that is in no table is refused. The server reads
fields by these tables, and `make test-tinker` holds them against the SDK's own types.
"""


def table(fields: Mapping[str, Field]) -> Iterator[str]:
    """Yields the rows of a type."""
    yield "| field | default | |"
    yield "|---|---|---|"
    for name, field in fields.items():
        default = "" if field.default is REQUIRED else f"`{field.default}`"
        text = field.text
        match field.use:
            case Use.REFUSED:
                text = f"refused: {text}"
            case Use.NO_EFFECT:
                text = f"no effect: {text}"
        yield f"| `{name}` | {default} | {text} |"


def losses() -> Iterator[str]:
    """Yields the rows of the losses, with the ranges and defaults of their settings."""
    yield "| loss_fn | inputs beside `target_tokens` | `loss_fn_config`, its range and default |"
    yield "|---|---|---|"
    for name, loss in LOSSES.items():
        inputs = [f"`{part}`" for part in loss.inputs[1:]]
        inputs += [f"`{part}`, if given" for part in loss.optional]
        settings = [
            f"`{key}` {setting.lowest:g} to {setting.highest:g}, {setting.default:g}"
            for key, setting in loss.settings.items()
        ]
        yield f"| `{name}` | {', '.join(inputs)} | {'; '.join(settings)} |"
    yield f"| `{UNPUBLISHED}` | | refused, unless `fallback` names one of these |"
    yield "| `custom` | | refused: the SDK computes it by `forward` |"


def page() -> str:
    """Returns the page."""
    lines = [HEAD]
    for name, fields in {**REQUESTS, **MESSAGES}.items():
        lines += [f"## {name}", "", *table(fields), ""]
    lines += ["## Inputs of losses", "", *table(LOSS_INPUTS), ""]
    lines += ["## Losses", "", *losses(), ""]
    lines += ["## Types that are not read", "", "| type | |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in UNREAD.items()]
    lines += ["", "## Addresses that are not served", "", "| address | |", "|---|---|"]
    lines += [f"| `{address}` | {reason} |" for address, reason in UNSERVED.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
