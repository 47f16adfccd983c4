"""Names of code in pages for those who change or extend Slipstream are names of ours."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "docs/guides/extensions.md")
FOLDERS = (
    "core",
    "protos",
    "client",
    "environments",
    "extensions",
    "learner",
    "rollout_server",
    "tests",
)
CODE = re.compile(r"`([^`\n]+)`")
# A class with a member, a class, or a name with an underscore; words of prose are none of them.
NAME = re.compile(
    r"[A-Z]\w*\.\w+"
    r"|[A-Z][a-z]+(?:[A-Z][a-z]+)*"
    r"|_?[A-Z]+(?:_[A-Z]+)+"
    r"|_?[a-z]+(?:_[a-z]+)+"
)
# Names of the standard library, and one that a rule for names makes up.
EXAMPLES = {"Any", "Protocol", "test_put_waits_while_queue_is_full"}


def names(page: str) -> list[str]:
    """The names of code between backticks; code in blocks is left out."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    spans = CODE.findall(text)
    return [span for span in spans if NAME.fullmatch(span) and span not in EXAMPLES]


def members(node: ast.ClassDef) -> Iterator[str]:
    """Methods, fields and attributes of a class."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner.name
        elif isinstance(inner, ast.AnnAssign):
            yield ast.unparse(inner.target).removeprefix("self.")
        elif isinstance(inner, ast.Assign):
            for target in inner.targets:
                yield ast.unparse(target).removeprefix("self.")


@functools.cache
def defined() -> frozenset[str]:
    """All names that our sources define, members with their class too."""
    identifiers: set[str] = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        identifiers.add(path.stem)
        identifiers.update(path.parts)
        if "_pb2" in path.name or path.is_relative_to(ROOT / "tests" / "data"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                identifiers.add(node.name)
                for member in members(node):
                    identifiers.update([member, f"{node.name}.{member}"])
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                identifiers.add(node.name)
                identifiers.update(
                    argument.arg
                    for argument in ast.walk(node.args)
                    if isinstance(argument, ast.arg)
                )
            elif isinstance(node, ast.Assign):
                identifiers.update(ast.unparse(target) for target in node.targets)
            elif isinstance(node, ast.AnnAssign):
                identifiers.add(ast.unparse(node.target))
    for path in (ROOT / "protos").rglob("*.proto"):
        identifiers.update(
            re.findall(r"^message (\w+)", path.read_text(), re.MULTILINE)
        )
    makefile = (ROOT / "Makefile").read_text()
    identifiers.update(re.findall(r"^([A-Z_]+) [?:]?=", makefile, re.MULTILINE))
    return frozenset(identifiers)


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_code_in_a_page_exists(page: str) -> None:
    names_in_page = names((ROOT / page).read_text())
    assert len(names_in_page) > 10
    unknown = [name for name in names_in_page if name not in defined()]
    assert not unknown, f"{page} names {unknown}, which no source defines"


def test_names_that_were_false_are_noticed() -> None:
    page = "`Batch.metrics`, `BucketSenders`, `Batch.lengths`, `queue.kind`, `found`\n"
    page += "```\n`Nowhere`\n```\n"
    assert names(page) == ["Batch.metrics", "BucketSenders", "Batch.lengths"]
    assert "Batch.metrics" not in defined()
    assert "BucketSenders" not in defined()
    assert "Batch.lengths" in defined()
