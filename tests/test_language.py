"""Rules on the language of code: methods have docstrings, and replaced words do not return."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "protos",
    "core",
    "client",
    "environments",
    "rollout_server",
    "learner",
    "extensions",
)
FOLDERS = (*PACKAGES, "deploy", "benchmarks", "tests")
# Identifiers that were replaced, and the word of the idea: one word for each.
WORDS = {
    "Standstill": "EnginePause",
    "turn_over": "resume_idle",
    "in_vain": "abandoned",
    "given_up": "abandoned",
    "giving_up": "abandoned",
    "card_lock": "gpu_lock",
    "card_buffers": "gpu_buffers",
    "cards_of": "gpu_names",
    "fill_cards": "fill_gpus",
    "Owed": "OverduePublish",
    "WeightSender": "BucketSender",
    "BucketTransport": "BucketReceiver",
}
# Old words as parts of identifiers: in `_given_up_s` and `OldStandstills`, not in `return_over`.
OLD_WORD = re.compile(rf"(?:(?<![a-z])|(?=[A-Z]))({'|'.join(WORDS)})s?(?![a-z])")

Texts = Iterator[tuple[int, str]]


def sources(*folders: str) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "_pb2" not in path.name
    )


def old_words(text: str) -> Texts:
    """Line and advice for each identifier with a word that was replaced."""
    if not OLD_WORD.search(text):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = OLD_WORD.search(token.string) if token.type == tokenize.NAME else None
        if match:
            yield (
                token.start[0],
                f"{token.string}: take {WORDS[match[1]]}, not {match[1]}",
            )


def bare_methods(text: str) -> Texts:
    """Line and name of each public method of a public class with neither docstring nor base.

    A property is left out: its name and its body may say everything.
    """
    for node in ast.walk(ast.parse(text)):
        if (
            not isinstance(node, ast.ClassDef)
            or node.name.startswith("_")
            or node.bases
        ):
            continue
        for method in node.body:
            if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_property = any(
                "property" in ast.unparse(decorator)
                for decorator in method.decorator_list
            )
            if not (
                method.name.startswith("_") or is_property or ast.get_docstring(method)
            ):
                yield method.lineno, method.name


def test_a_method_has_a_docstring_unless_a_protocol_describes_it() -> None:
    paths = sources(*PACKAGES)
    texts = "\n".join(path.read_text() for path in paths)
    described = set(re.findall(r"def (\w+)\([^)]*\)[^:]*:\n\s+\"\"\"", texts))
    check(paths, lambda text: (t for t in bare_methods(text) if t[1] not in described))


def test_replaced_words_do_not_come_back_as_identifiers() -> None:
    paths = sources(*PACKAGES)
    assert not [path for path in paths if OLD_WORD.search(path.stem)]
    check(paths, old_words)


def check(paths: list[Path], rule: Callable[[str], Texts]) -> None:
    """Fails with file, line and words of everything that `rule` finds."""
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in paths
        for line, words in rule(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "text", "found"),
    [
        (
            old_words,
            "self._given_up_s = 1\n",
            [(1, "_given_up_s: take abandoned, not given_up")],
        ),
        (
            old_words,
            "class A(Standstills): ...\n",
            [(1, "Standstills: take EnginePause, not Standstill")],
        ),
        (old_words, "OldOwed = 1\n", [(1, "OldOwed: take OverduePublish, not Owed")]),
        (old_words, "return_over, x.cards, Disallowed, 'in_vain' = y\n", []),
    ],
)
def test_the_rules_notice_what_they_forbid(rule, text, found):
    assert list(rule(text)) == found
