#!/usr/bin/env python3
"""Counts how plainly Python code is written, and holds each file to a budget.

usage: plain.py [--files N] [PATH ...]      totals, then the N files with most to rewrite
       plain.py --tighten                   lowers the budgets of files that became plainer

A file may have what the goals allow, or what its line in plain_budgets.txt says if that is more.
Budgets only fall: `--tighten` never raises one, and a renamed file takes its line along by hand.
"""

import ast
import io
import math
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = (
    "core",
    "protos",
    "client",
    "environments",
    "extensions",
    "learner",
    "rollout_server",
)
FOLDERS = (*PRODUCT, "deploy", "benchmarks", "docs", "tests")
BUDGETS = ROOT / "tests" / "plain_budgets.txt"

# Examples of words that tell what happened to a thing; a name tells what the thing is.
NOTHING_WORDS = frozenset(
    re.findall(
        r"\w+",
        """found given own told known its wanted whole each one mine made used said named held least
        most them these those others another begun began taken asked chosen kept left past lost
        heard""",
    )
)
PRONOUN = re.compile(
    r"# ?(They|Their|Its?|Those|These|Such|What|Who|Whoever|This|That|Else|Another|Others|One|Each|"
    r"None|Nobody|So|Then|Behind|Beside|Until|Where|Whatever)\b"
)
LAYOUT_TOKENS = frozenset(
    (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
)
# Python 3.12 reads an f-string as many tokens; they count as the one that it is in 3.11.
FSTRING_START = getattr(tokenize, "FSTRING_START", None)
FSTRING_END = getattr(tokenize, "FSTRING_END", None)
# Tokens above the goal or budget that any file may have.
SPARE_TOKENS = 60


@dataclass(frozen=True)
class Goals:
    """What a file may have without a budget of its own."""

    nothing_words: float  # Share of assigned names.
    packings: float  # In a line of the file.
    splats: int
    pronouns: float  # Share of comments.
    tokens: float  # On a line of code.


PRODUCT_GOALS = Goals(
    nothing_words=0.01,
    packings=0.002,
    splats=0,
    pronouns=0.02,
    tokens=8.0,
)
TEST_GOALS = Goals(
    nothing_words=0.02,
    packings=0.002,
    splats=0,
    pronouns=0.04,
    tokens=8.5,
)


@dataclass(frozen=True)
class Place:
    """A line that can be plainer, and how."""

    line: int
    advice: str


@dataclass
class Counts:
    """The counts of one file, or of several."""

    lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    names: int = 0
    comments: int = 0
    nothing_words: list[Place] = field(default_factory=list)
    packings: list[Place] = field(default_factory=list)
    splats: list[Place] = field(default_factory=list)
    pronouns: list[Place] = field(default_factory=list)
    dense_lines: list[Place] = field(default_factory=list)

    @property
    def tokens_a_line(self) -> float:
        return self.tokens / self.code_lines if self.code_lines else 0.0

    def add(self, other: "Counts") -> None:
        """Joins the counts of another file."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        return (
            f"{self.lines} lines, {self.tokens} tokens, {self.tokens_a_line:.2f} a line of code; "
            f"nothing-words {_share(self.nothing_words, self.names):.1%} of assigned names, "
            f"packings {1000 * _share(self.packings, self.lines):.1f} a thousand lines, "
            f"splats {len(self.splats)}, comments that open with a pronoun "
            f"{_share(self.pronouns, self.comments):.1%}"
        )


def _share(places: list[Place], total: int) -> float:
    return len(places) / total if total else 0.0


# The counts that a budget names; `tokens` is a ratio.
PLACES = ("nothing_words", "packings", "splats", "pronouns")
Budget = dict[str, float]


def count(text: str) -> Counts:
    """Counts one file's text."""
    counts = Counts(lines=text.count("\n"))
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        _count_node(node, counts)
        docstring_lines.update(_docstring_lines(node))
    _count_tokens(text, docstring_lines, counts)
    return counts


def _count_node(node: ast.AST, counts: Counts) -> None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        counts.names += 1
        if node.id in NOTHING_WORDS:
            advice = f"`{node.id}` names nothing: say what the value is, such as proximal_logprobs"
            counts.nothing_words.append(Place(node.lineno, advice))
    elif isinstance(node, ast.Assign):
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            advice = f"`{ast.unparse(target)} = ...` packs: write one assignment a line"
            counts.packings.append(Place(node.lineno, advice))
    elif isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
        advice = (
            f"`{ast.unparse(node)[:60]}` unpacks a literal: write its items one a line"
        )
        counts.splats.append(Place(node.lineno, advice))


def _docstring_lines(node: ast.AST) -> range:
    if not isinstance(
        node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ):
        return range(0)
    if not ast.get_docstring(node):
        return range(0)
    docstring = node.body[0]
    return range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)


def _count_tokens(text: str, docstring_lines: set[int], counts: Counts) -> None:
    tokens_of_line: dict[int, int] = {}
    last_comment = -1
    fstring_depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        first_line = token.start[0]
        if token.type == tokenize.COMMENT:
            if first_line != last_comment + 1:
                counts.comments += 1
                pronoun = PRONOUN.match(token.string)
                if pronoun:
                    advice = (
                        f"a comment opens with `{pronoun[1]}`: name what it speaks of"
                    )
                    counts.pronouns.append(Place(first_line, advice))
            last_comment = first_line
            continue
        if token.type in LAYOUT_TOKENS or first_line in docstring_lines:
            continue
        for line in range(first_line, token.end[0] + 1):
            tokens_of_line.setdefault(line, 0)
        if not fstring_depth:
            tokens_of_line[first_line] += 1
        fstring_depth += token.type == FSTRING_START
        fstring_depth -= token.type == FSTRING_END
    counts.code_lines = len(tokens_of_line)
    counts.tokens = sum(tokens_of_line.values())
    densest = sorted(
        tokens_of_line, key=lambda line: tokens_of_line[line], reverse=True
    )[:5]
    for line in densest:
        advice = (
            f"{tokens_of_line[line]} tokens on a line: name a part of it, or give "
            f"it more lines"
        )
        counts.dense_lines.append(Place(line, advice))


def is_test(path: Path) -> bool:
    """Whether the goals of tests hold for a file."""
    return path.is_relative_to(ROOT / "tests")


def allowed(path: Path, counts: Counts, budget: Budget) -> Budget:
    """How many places of each kind a file may have, and how many tokens in all."""
    goals = TEST_GOALS if is_test(path) else PRODUCT_GOALS
    limits = {
        "nothing_words": max(1, math.floor(goals.nothing_words * counts.names)),
        "packings": max(1, math.floor(goals.packings * counts.lines)),
        "splats": goals.splats,
        "pronouns": max(1, math.floor(goals.pronouns * counts.comments)),
        "tokens": goals.tokens,
    }
    limits = {name: max(limit, budget.get(name, 0)) for name, limit in limits.items()}
    limits["tokens"] = math.floor(limits["tokens"] * counts.code_lines) + SPARE_TOKENS
    return limits


def problems(path: Path, counts: Counts, budget: Budget) -> Iterator[str]:
    """A line for each count above what the file may have, then one for each of its places."""
    name = path.relative_to(ROOT)
    limits = allowed(path, counts, budget)
    for kind in PLACES:
        places: list[Place] = getattr(counts, kind)
        if len(places) > limits[kind]:
            yield f"{name}: {len(places)} {kind.replace('_', '-')}, at most {limits[kind]:.0f}"
            for place in places:
                yield f"  {name}:{place.line}: {place.advice}"
    if counts.tokens > limits["tokens"]:
        yield (
            f"{name}: {counts.tokens_a_line:.2f} tokens on a line of code, "
            f"{counts.tokens - limits['tokens']:.0f} tokens too many for its lines"
        )
        for place in counts.dense_lines:
            yield f"  {name}:{place.line}: {place.advice}"


def excess(path: Path, counts: Counts) -> Budget:
    """The counts of a file that are above its goals, as a budget."""
    limits = allowed(path, counts, {})
    budget: Budget = {}
    for kind in PLACES:
        number = len(getattr(counts, kind))
        if number > limits[kind]:
            budget[kind] = number
    if counts.tokens > limits["tokens"]:
        budget["tokens"] = math.ceil(counts.tokens_a_line * 100) / 100
    return budget


def read_budgets(text: str) -> dict[str, Budget]:
    """Reads lines such as `core/a.py nothing_words=3 tokens=8.71`, without comments.

    A merge may leave two lines for a file: the lower number of each kind holds.
    """
    budgets: dict[str, Budget] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            path, *columns = line.split()
            pairs = [column.split("=") for column in columns]
            budget = {kind: float(number) for kind, number in pairs}
            earlier = budgets.get(path, budget)
            budgets[path] = {
                kind: min(number, earlier[kind])
                for kind, number in budget.items()
                if kind in earlier
            }
    return budgets


def written_budgets(budgets: dict[str, Budget]) -> str:
    """The text of the budgets, one file a line in the order of their paths."""
    lines = ["# Written by `python tests/plain.py --tighten`; counts may only fall."]
    for path in sorted(budgets):
        columns = [f"{kind}={number:g}" for kind, number in budgets[path].items()]
        if columns:
            lines.append(" ".join([path, *columns]))
    return "\n".join(lines) + "\n"


def tightened(
    budgets: dict[str, Budget], counted: dict[Path, Counts]
) -> dict[str, Budget]:
    """The budgets, lowered to what files have now; no budget rises, none is added."""
    lower: dict[str, Budget] = {}
    for path, counts in counted.items():
        name = str(path.relative_to(ROOT))
        budget = budgets.get(name, {})
        present = excess(path, counts)
        lower[name] = {
            kind: min(number, present[kind])
            for kind, number in budget.items()
            if kind in present
        }
    return lower


def python_files(paths: list[Path]) -> list[Path]:
    """The Python files below the paths, generated ones left out."""
    files: list[Path] = []
    for path in paths:
        files.extend([path] if path.suffix == ".py" else sorted(path.rglob("*.py")))
    return [
        path for path in files if "_pb2" not in path.name and "/v1/" not in str(path)
    ]


def repository_files() -> list[Path]:
    """Each file that has a budget."""
    return python_files([ROOT / folder for folder in FOLDERS])


def main(arguments: list[str]) -> None:
    """Prints counts, or lowers budgets."""
    if arguments == ["--tighten"]:
        counted = {path: count(path.read_text()) for path in repository_files()}
        budgets = read_budgets(BUDGETS.read_text())
        BUDGETS.write_text(written_budgets(tightened(budgets, counted)))
        return
    num_files = 0
    if arguments[:1] == ["--files"]:
        num_files = int(arguments[1])
        arguments = arguments[2:]
    paths = [Path(argument) for argument in arguments] or [
        ROOT / folder for folder in PRODUCT
    ]
    total = Counts()
    counted = {path: count(path.read_text()) for path in python_files(paths)}
    for counts in counted.values():
        total.add(counts)
    print(total)

    def num_places(path: Path) -> int:
        counts = counted[path]
        weights = {"nothing_words": 1, "packings": 2, "splats": 3, "pronouns": 1}
        return sum(
            weight * len(getattr(counts, kind)) for kind, weight in weights.items()
        )

    for path in sorted(counted, key=num_places, reverse=True)[:num_files]:
        print(f"{path}: {counted[path]}")


if __name__ == "__main__":
    main(sys.argv[1:])
