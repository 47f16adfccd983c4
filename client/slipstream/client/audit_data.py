"""Looks at what the tasks of an environment ask, and at what they call the right answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from slipstream.client.terminal import counted

# Tasks from which the same right answer everywhere is a surprise.
_SEVERAL = 4
# Characters of a text that no other text holds by chance, and those that a line shows.
_LONG, _SHOWN = 12, 60
# Tasks of one environment that are looked for in another one.
_MAX_COMPARED = 512

_OPTION = re.compile(r"(?:^|(?<=[\s(]))\(?([A-H])[).:]\s*\S")
# An answer that the prompt calls so, one alone behind a question, and one among other words.
_CALLED = (
    r"(?:answer|solution|result|hint|key|label|target|correct|expected)\W{{0,3}}(?:is)?\W{{0,3}}{0}"
    r"(?!\w|\s*(?:[,/|]|or\b)\s*\w)"
)
_ALONE = r"\w(?=\W*[.?!])\W*(?<!\w){0}\W*$"
_NAMED = r"(?<!\w){0}(?!\w)"


@dataclass
class Row:
    """One task: its messages, each with role and text, and its right answer and reply."""

    index: int
    said: Sequence[tuple[str, str]]
    answer: str = ""
    reply: str = ""
    has_images: bool = False

    @property
    def prompt(self) -> str:
        return self.said[-1][1] if self.said else ""

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.said)

    @property
    def right(self) -> str:
        """What is right, as a text; "" if it is not known."""
        return self.answer or self.reply


def surprises(rows: Sequence[Row], *, is_interactive: bool) -> Iterator[str]:
    """Yields a line for each oddity of `rows`; tasks with several turns may begin alike."""
    known = [row for row in rows if row.right]
    shown = [row for row in rows if row.said and not row.has_images]
    blank = [row for row in shown if not row.text.strip()]
    first: dict[str, Row] = {}
    pairs = [(first.setdefault(key_of(row.text), row), row) for row in shown]
    differing = [pair for pair in pairs if key_of(pair[0].right) != key_of(pair[1].right)]
    alike = [(one, other) for one, other in pairs if one.text != other.text]
    if blank:
        yield f"task {blank[0].index} begins without a text"
    elif differing and not is_interactive:
        one, other = differing[0]
        what = f"tasks {one.index} and {other.index} ask the same, {quoted(one.prompt)}, with"
        yield f"{what} the answers {quoted(one.right)} and {quoted(other.right)}"
    elif alike and not is_interactive:
        one, other = alike[0]
        what = f"{of(len(alike), len(rows))} ask what another one asks but for spaces and case"
        yield f"{what}, such as tasks {one.index} and {other.index}, {quoted(one.prompt)}"
    if len(known) >= _SEVERAL and len({row.right for row in known}) == 1:
        yield f"the right answer is the same in all {len(known)} tasks: {quoted(known[0].right)}"
    if told := _told([row for row in known if row.answer.strip()]):
        what = (
            f"{of(len(told), len(known))}, such as task {told[0].index}, {quoted(told[0].prompt)}"
        )
        yield f"the prompt holds the right answer in {what}, right {quoted(told[0].right)}"
    if known and len(known) < len(rows):
        lacking = [row.index for row in rows if not row.right]
        yield f"{of(len(lacking), len(rows))}, such as task {lacking[0]}, have no right answer"


def _told(rows: Sequence[Row]) -> list[Row]:
    """Returns rows whose prompts hold the answer, more often than they hold that of others."""

    def holds(text: str, form: str, answer: str) -> bool:
        said = re.escape(answer.strip())
        return bool(text) and re.search(form.format(said), text, re.IGNORECASE) is not None

    common = Counter(said for row in rows for said in row.said)
    texts = [row.text for row in rows]
    # What instructions tell about one row.
    own = [
        "\n".join(said[1] for said in row.said if said[0] == "system" and common[said] == 1)
        for row in rows
    ]
    found = {
        row.index
        for row in rows
        if len(row.answer) >= _LONG
        and row.answer in row.text
        and not {"A", "B"} <= {*_OPTION.findall(row.prompt)}
    }
    for form, places in ((_CALLED, texts), (_ALONE, texts), (_NAMED, own)):
        paired = list(zip(rows, [*rows[1:], *rows[:1]], places, strict=True))
        told = {row.index for row, _, text in paired if holds(text, form, row.answer)}
        by_chance = sum(
            holds(text, form, other.answer) and key_of(row.answer) != key_of(other.answer)
            for row, other, text in paired
        )
        found |= told if len(told) > 2 * by_chance else set()
    return [row for row in rows if row.index in found]


def key_of(text: str) -> str:
    """Returns a text in single spaces and small letters, but for words of one letter."""
    return re.sub(r"\w{2,}", lambda word: word[0].casefold(), " ".join(text.split()))


def shared_questions(
    held: Sequence[tuple[str, str]], trained: Sequence[tuple[str, str]]
) -> tuple[int, int]:
    """Returns how many of `held` were looked at, and how many of these are in `trained` too.

    Each is the key of a prompt and the right answer. What all prompts of one side begin and end
    with, such as an instruction, makes no difference.
    """
    held = held[:: max(1, -(-len(held) // _MAX_COMPARED))]
    known: dict[str, list[tuple[str, str]]] = {}
    for (text, answer), core in zip(trained, _cores(trained), strict=True):
        known.setdefault(answer, []).append((text, core))
    shared = sum(
        any(
            text == other
            or (len(other) >= _LONG and other in text)
            or (len(text) >= _LONG and text in other)
            or (" " in core and " " in its and its in text and core in other)
            for other, its in known.get(answer, ())
        )
        for (text, answer), core in zip(held, _cores(held), strict=True)
    )
    return len(held), shared


def _cores(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the texts without what all of them begin and end with."""
    texts = [text for text, _ in rows]
    start = len(commonprefix(texts)) if len(texts) > 1 else 0
    end = len(commonprefix([text[start:][::-1] for text in texts])) if len(texts) > 1 else 0
    return [text[start : len(text) - end].strip() for text in texts]


def of(number: int, total: int) -> str:
    """Returns how many of all tasks."""
    return f"{number} of {counted(total, 'task')}"


def quoted(text: str) -> str:
    """Returns a text in quotes on one line, cut where it is long."""
    text = " ".join(text.split())
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
