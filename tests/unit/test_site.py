"""The documentation site: its list of pages is whole, and its diagrams can be drawn."""

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
sequence_svg = runpy.run_path(str(SITE / "sequence.py"))["sequence_svg"]


def contents() -> dict[str, list[str]]:
    """CONTENTS of the settings, which need Sphinx to be run."""
    for node in ast.parse((SITE / "conf.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTENTS":
            return ast.literal_eval(node.value)
    raise AssertionError


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = {page for pages in contents().values() for page in pages}
    pages = {
        str(p.relative_to(ROOT).with_suffix("")) for p in (ROOT / "docs").rglob("*.md")
    }
    below = ("docs/adr/0", "docs/settings/")
    assert {page for page in pages if not page.startswith(below)} <= listed
    assert all((ROOT / f"{page}.md").exists() for page in listed)


def test_a_diagram_shows_parties_messages_and_notes() -> None:
    drawing = sequence_svg(
        "sequenceDiagram\n"
        "    participant A as controller\n"
        "    participant B as rollout server\n"
        "    A->>B: order <1>\n"
        "    B-->>A: answer\n"
        "    Note over A,B: both wait\n"
    )
    assert drawing.count("<rect") == 3
    assert drawing.count('class="arrow"') == 2
    assert drawing.count("stroke-dasharray") == 1
    assert "order &lt;1&gt;" in drawing


@pytest.mark.parametrize(
    "text", ["graph LR\n a --> b", "sequenceDiagram\n loop forever\n end"]
)
def test_what_cannot_be_drawn_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="can be drawn"):
        sequence_svg(text)


def test_every_diagram_of_the_pages_can_be_drawn() -> None:
    texts = [page.read_text() for page in (ROOT / "docs").rglob("*.md")]
    blocks = re.findall(
        r"^```mermaid\n(.*?)^```$", "".join(texts), re.DOTALL | re.MULTILINE
    )
    assert blocks
    assert all("<svg" in sequence_svg(block) for block in blocks)
