"""Settings of Sphinx for the documentation site; `make docs` writes it into site/.

The source folder is the root of the repository, so that every link of a page leads on the site to
what it leads to on GitHub. A link to a file that is no page offers the file itself.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

from sequence import sequence_svg

project = "Slipstream"
html_title = "Slipstream"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Docstrings mark code as Markdown does.
default_role = "code"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/results/*.md", "tests/parity/*.md"]
exclude_patterns = [".*", "build", "dist", "site", "runs", "models"]

# The anchors of headings are those of GitHub.
myst_heading_anchors = 4
highlight_language = "none"

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_extra_path = ["index.html"]
html_copy_source = False
html_show_sphinx = False
# The name of the project in the sidebar is enough.
html_theme_options = {"navigation_with_keys": True}

CONTENTS = {
    "Start": ["docs/tutorial"],
    "Guides": [
        "docs/guides/environments",
        "docs/guides/environment-runs",
        "docs/guides/notebook",
        "docs/guides/questions",
        "docs/guides/frameworks",
        "docs/guides/agents",
        "docs/guides/demonstrations",
        "docs/guides/rollouts",
        "docs/guides/distillation",
        "docs/guides/own-algorithms",
        "docs/guides/own-loop",
        "docs/guides/tinker-contract",
        "docs/guides/extensions",
        "docs/guides/sandbox",
        "docs/guides/judges",
        "docs/guides/watching",
        "docs/guides/no-learning",
        "docs/guides/hangs",
        "docs/guides/prometheus",
        "docs/guides/checkpoints",
        "docs/guides/verify",
        "docs/guides/debugging",
        "docs/guides/models",
        "docs/guides/images",
        "docs/guides/agreement",
        "docs/guides/parallelism",
        "docs/guides/engine_at_an_address",
        "docs/guides/deployment",
        "docs/guides/cluster",
        "docs/guides/kubernetes",
        "docs/guides/skypilot",
        "docs/guides/gpus",
        "docs/guides/upgrades",
        "docs/guides/migration",
    ],
    "Reference": [
        "docs/configuration",
        "docs/cli",
        "docs/api",
        "docs/algorithms",
        "docs/metrics",
        "docs/events",
        "docs/errors",
        "docs/support",
        "docs/protocol",
        "docs/security",
        "docs/performance",
    ],
    "Internals": [
        "docs/architecture",
        "docs/internals/staleness",
        "docs/internals/weights",
        "docs/internals/wire_weights",
        "docs/internals/limits",
        "docs/internals/stored_weights",
        "docs/internals/journal",
        "docs/internals/proofs",
        "docs/internals/trainer",
        "docs/internals/rollout_server",
        "docs/adr/README",
    ],
    "Project": [
        "CHANGELOG",
        "CONTRIBUTING",
        "CODE_OF_CONDUCT",
        "SECURITY",
        "tests/parity/feature-parity",
    ],
}
# Pages below a page of the list.
BELOW = {
    "docs/adr/README": "0*",
    "docs/configuration": "settings/*",
    "docs/performance": "/benchmarks/results/*",
}
# Badges lie beside the files of the repository on GitHub, whatever its address.
BADGE = re.compile(r"^\[!\[.*\n", re.MULTILINE)
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def tree(*lines: str) -> str:
    """Returns a list of pages that shows in the sidebar only."""
    return "\n".join(["", "```{toctree}", ":hidden:", *lines, "```", ""])


def drawn(match: re.Match[str]) -> str:
    """Returns a sequence diagram as SVG."""
    return "```{raw} html\n" + sequence_svg(match[1]) + "\n```"


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = MERMAID.sub(drawn, BADGE.sub("", source[0]))
    if docname == root_doc:
        trees = (tree(f":caption: {name}", "", *pages) for name, pages in CONTENTS.items())
        source[0] += "".join(trees)
    if docname in BELOW:
        source[0] += tree(":glob:", "", BELOW[docname])


def setup(app: Sphinx) -> None:
    """Sphinx calls this when it starts."""
    app.connect("source-read", _read)
