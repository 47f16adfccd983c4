"""Rules on the language of code and pages: how a text begins, and which words must not return."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("protos", "core", "client", "environments", "rollout_server", "learner", "extensions")
FOLDERS = (*PACKAGES, "deploy", "benchmarks", "tests")
# A docstring or comment that opens with one of these leaves out its subject or its verb. Comments
# of settings and of messages are descriptions that users read; they have no other rule.
OPENINGS = {"Of", "As", "For", "From", "Until", "Who"}
# Such a word where a docstring or comment can begin. The sources that have one are few, and reading
# the tokens of all takes seconds.
POSSIBLE_OPENING = re.compile(rf"""[#"'](?:\s|\\.)*(?:{"|".join(OPENINGS)})\b""")
# "For each token ..." and "From any host ..." are good prose where a main clause follows, which no
# test can tell. A paragraph or list item with one of these is inverted, or lacks its subject.
OPENINGS_OF_PROSE = OPENINGS - {"For", "From"}
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


def docstrings(text: str) -> Texts:
    """Line and text of each docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node, clean=True)
            if found:
                yield node.body[0].lineno, found


def joined(parts: Texts, alone: set[int]) -> Texts:
    """Texts on consecutive lines as one, at its first line; those on lines `alone` stay alone."""
    block: list[str] = []
    first = last = 0
    for line, part in parts:
        if block and line == last + 1 and not {line, last} & alone:
            block.append(part)
        else:
            if block:
                yield first, " ".join(block)
            block, first = [part], line
        last = line
    if block:
        yield first, " ".join(block)


def comments(text: str) -> Texts:
    """Line and text of each comment; comments on consecutive lines of their own are one."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [token for token in tokens if token.type == tokenize.COMMENT]
    behind_code = {t.start[0] for t in found if t.line[: t.start[1]].strip()}
    return joined(((t.start[0], t.string.removeprefix("#").strip()) for t in found), behind_code)


def proto_comments(text: str) -> Texts:
    """Line and text of each comment of a .proto file, joined as `comments` does."""
    lines = [line.partition("//") for line in text.splitlines()]
    behind_code = {number for number, (code, _, _) in enumerate(lines, 1) if code.strip()}
    parts = ((n, said.strip()) for n, (_, mark, said) in enumerate(lines, 1) if mark)
    return joined(parts, behind_code)


def paragraphs(text: str) -> Texts:
    """Line and first line of each paragraph and list item of a Markdown page, code left out."""
    is_code, before = False, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
            before = ""
            continue
        item = re.match(r"\s*(?:[-*+]|\d+\.)\s+(.*)", line)
        if not is_code and (item or not before.strip()):
            yield number, (item[1] if item else line).strip().lstrip("*_> ")
        before = line


def wrong(texts: Texts, openings: set[str]) -> Texts:
    """Line and first words of each text that opens with a forbidden word."""
    for line, sentence in sorted(texts):
        words = sentence.split()
        if words and words[0].rstrip(",:;*") in openings:
            yield line, " ".join(words[:6])


def wrong_in_code(text: str) -> Texts:
    if not POSSIBLE_OPENING.search(text):
        return iter(())
    return wrong(iter([*docstrings(text), *comments(text)]), OPENINGS)


def wrong_in_proto(text: str) -> Texts:
    return wrong(proto_comments(text), OPENINGS)


def wrong_in_page(text: str) -> Texts:
    return wrong(paragraphs(text), OPENINGS_OF_PROSE)


def old_words(text: str) -> Texts:
    """Line and advice for each identifier with a word that was replaced."""
    if not OLD_WORD.search(text):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        found = OLD_WORD.search(token.string) if token.type == tokenize.NAME else None
        if found:
            yield token.start[0], f"{token.string}: take {WORDS[found[1]]}, not {found[1]}"


def test_no_docstring_or_comment_leaves_out_its_subject() -> None:
    check(sources(*FOLDERS), wrong_in_code)


def test_no_comment_of_a_message_leaves_out_its_subject() -> None:
    check(sorted((ROOT / "protos").rglob("*.proto")), wrong_in_proto)


def test_no_paragraph_of_a_page_begins_with_an_inverted_clause() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    check([*pages, *sorted((ROOT / "docs").rglob("*.md"))], wrong_in_page)


def bare_methods(text: str) -> Texts:
    """Line and name of each public method of a public class with neither docstring nor base.

    A property is left out: its name and its body may say everything.
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or node.bases:
            continue
        for method in node.body:
            if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_property = any("property" in ast.unparse(each) for each in method.decorator_list)
            if not (method.name.startswith("_") or is_property or ast.get_docstring(method)):
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
        (wrong_in_code, '"""Of one engine."""\n', [(1, "Of one engine.")]),
        (
            wrong_in_code,
            "r'''\n\n  Who asks.'''\n#\n#  As, told\n",
            [(1, "Who asks."), (4, "As, told")],
        ),
        (wrong_in_code, '"\\n From it."\n', [(1, "From it.")]),
        (
            wrong_in_code,
            "x = 1\n# For the holder.\n# As told.\n",
            [(2, "For the holder. As told.")],
        ),
        (wrong_in_code, "x = 1  # A number.\n# As told.\n", [(2, "As told.")]),
        (wrong_in_code, "# Offers a lease.\n# Formats it.\n", []),
        (wrong_in_code, 'def f():\n    """Until, as told."""\n', [(2, "Until, as told.")]),
        (
            wrong_in_proto,
            "// Who asks.\nint32 a = 1;  // From it.\n",
            [(1, "Who asks."), (2, "From it.")],
        ),
        (wrong_in_proto, "int32 a = 1;  // Bytes.\n// The size\n// Of it.\n", []),
        (
            wrong_in_page,
            "# Of it\n\nOf it.\n\n- **Until** then\n",
            [(3, "Of it."), (5, "Until** then")],
        ),
        (wrong_in_page, "Say it\nAs told.\n\nFor each token.\n\n```\nAs told\n\nOf it\n```\n", []),
        (old_words, "self._given_up_s = 1\n", [(1, "_given_up_s: take abandoned, not given_up")]),
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
