"""Draws the sequence diagrams of the pages as SVG, so that the site needs no script of others.

GitHub draws the same blocks by itself. What this module knows of mermaid's language:

    sequenceDiagram
        participant C as controller
        participant S as rollout server
        C->>S: an order
        S-->>C: an answer
        Note over S: what it does meanwhile
        Note over C,S: what both do
"""

from __future__ import annotations

import re
from html import escape

COLUMN = 300
ROW = 44
TOP = 72
PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
MESSAGE = re.compile(r"(\w+)(-?->>)(\w+): (.+)")
NOTE = re.compile(r"Note over (\w+)(?:,(\w+))?: (.+)")


def sequence_svg(text: str) -> str:
    """Returns the drawing of one block; raises ValueError for a line that it does not know."""
    first, *lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if first != "sequenceDiagram":
        raise ValueError(f"only sequenceDiagram can be drawn, got {first!r}")
    columns: dict[str, int] = {}
    parts: list[str] = []
    height = TOP
    for line in lines:
        if match := PARTICIPANT.fullmatch(line):
            columns[match[1]] = COLUMN // 2 + COLUMN * len(columns)
            parts.append(_box(columns[match[1]] - 90, 8, width=180, text=match[2]))
        elif match := MESSAGE.fullmatch(line):
            ends = columns[match[1]], columns[match[3]]
            parts.append(_arrow(*ends, height, text=match[4], dashed=match[2] == "-->>"))
            height += ROW
        elif match := NOTE.fullmatch(line):
            left = columns[match[1]]
            right = columns[match[2] or match[1]]
            left, right = min(left, right) - 135, max(left, right) + 135
            parts.append(_box(left, height - 18, width=right - left, text=match[3]))
            height += ROW
        else:
            raise ValueError(f"not a line of a sequence diagram that can be drawn: {line!r}")
    return _drawing(columns, parts, height)


def _drawing(columns: dict[str, int], parts: list[str], height: int) -> str:
    lives = "".join(
        f'<line class="life" x1="{x}" y1="38" x2="{x}" y2="{height}"/>' for x in columns.values()
    )
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="9" markerHeight="9" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker>'
    )
    size = f"0 0 {COLUMN * len(columns)} {height}"
    return (
        f'<div class="sequence"><svg viewBox="{size}" role="img">'
        f"<defs>{head}</defs>{lives}{''.join(parts)}</svg></div>"
    )


def _box(x: int, y: int, *, width: int, text: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="30" rx="4"/>'
        f'<text x="{x + width // 2}" y="{y + 20}">{escape(text)}</text>'
    )


def _arrow(start: int, end: int, y: int, *, text: str, dashed: bool) -> str:
    style = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<text x="{(start + end) // 2}" y="{y - 7}">{escape(text)}</text>'
        f'<line class="arrow" x1="{start}" y1="{y}" x2="{end}" y2="{y}"{style}/>'
    )
