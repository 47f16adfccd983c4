"""Lists, sets, points and vectors, whose parts are right answers of any kind."""

import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from slipstream.environments.answers import bare
from slipstream.environments.math_judge.formulas import plain_words
from slipstream.environments.math_judge.phrases import asks_order, core, endings, without_aside
from slipstream.environments.math_judge.verdict import RightAnswer

ReadAnswer: TypeAlias = Callable[[str, str], RightAnswer]

# Which form of a reply may say each form of an answer.
_MAY_SAY = {
    "set": ("set", "several", "either"),
    "point": ("point", "pair", "several", "vector"),
    "pair": ("pair", "point", "several", "vector"),
    "vector": ("vector", "pair", "several", "closed"),
    "several": ("several", "set", "either", "pair", "point", "closed", "vector"),
    "either": ("either", "set", "several"),
    "closed": ("closed", "several", "pair"),
}
# Opening and closing brackets, and the form of a list within them.
_BRACKETS = (
    (r"\{", r"\}", "set"),
    ("{", "}", "set"),
    ("(", ")", "pair"),
    ("[", "]", "closed"),
)
_ORDERED = ("pair", "vector", "closed")
MAX_PARTS = 100
_COLUMN = re.compile(
    r"\\begin\{[pbvBV]?(?:small)?matrix\}(.*?)\\end\{[pbvBV]?(?:small)?matrix\}", re.DOTALL
)
_ANGLES = re.compile(
    r"(?:\\langle|⟨"
    r"|<)\s*([^<>]*?,[^<>]*?)\s*(?:\\rangle|⟩|>)"
)
_NAME = r"(?:[A-Za-z](?:_\{?\w+\}?)?)"
_NAMED_PART = re.compile(rf"\s*({_NAME})\s*=\s*(.+)", re.DOTALL)
_NAMED_POINT = re.compile(r"\(\s*[A-Za-z]\w*(?:\s*,\s*[A-Za-z]\w*)+\s*\)\s*=\s*(.*)", re.DOTALL)
_MEMBER = re.compile(
    r"^[A-Za-z]\s*(?:\\in\b"
    r"|∈|in\b)\s*(?=\\?\{)"
)
_PLUS_MINUS = re.compile(r"\\pm(?![a-z])|±|\+/-|\+-")
_SEPARATOR = re.compile(
    r"\s*(?:,|;)\s*(?:\\?(?:text)?\{?\s*(?:and"
    r"|or)\b\s*\}?\s*)?"
    r"|\s+(?:and|or)\s+|\s*&\s*"
)
_SUBJECT = re.compile(
    r"^.*?\b(?:are"
    r"|is|include|includes"
    r"|equals?|consists? of"
    r"|get|obtain|have"
    r"|gives?|were|be)\b"
    r"(?: (?:at|the (?:numbers"
    r"|set|values|points?)"
    r"|given by|therefore"
    r"|thus))?:?\s+(?=[^.]*$)",
    re.IGNORECASE | re.DOTALL,
)
_TAIL = re.compile(
    r"\s+(?:respectively"
    r"|in (?:that|this) order"
    r"|in total|only)$",
    re.IGNORECASE,
)


class _Parts(NamedTuple):
    """The parts of a list, the form in which they stand together, and their names if they have."""

    form: str
    texts: tuple[str, ...]
    names: tuple[str, ...] = ()


def parts_of(text: str) -> _Parts | None:
    """Returns the parts of a text that is a list, or None."""
    text = plain_marks(text)
    text = _MEMBER.sub("", text)
    if (point := _NAMED_POINT.fullmatch(text)) is not None:
        parts = parts_of(point[1])
        return None if parts is None else _Parts("point", parts.texts)
    if (column := _COLUMN.fullmatch(text)) is not None:
        return _column_parts(column[1])
    if (angles := _ANGLES.fullmatch(text)) is not None:
        return _Parts("vector", tuple(_split(angles[1])))
    assigned = re.fullmatch(rf"{_NAME}(?:\([a-z]\))?\s*=\s*([(\[{{\\].*)", text, re.DOTALL)
    if assigned is not None:
        parts = parts_of(assigned[1])
        if parts is not None and parts.form != "several":
            return parts
    form, inside = _brackets(text)
    if form == "several" and (signs := _PLUS_MINUS.search(text)) is not None:
        return _signed_parts(text, signs)
    texts = _split(inside)
    if form == "set" and not inside:
        return None
    if len(texts) < 2 and form != "set":
        return None
    if len(texts) > MAX_PARTS:
        return None
    if form == "several" and re.search(r"(?<![A-Za-z])or(?![A-Za-z])", _outside_groups(inside)):
        form = "either"
    if form in ("several", "either") and _NAMED_PART.fullmatch(texts[0]) is not None:
        return _named_parts(texts, form)
    expanded: list[str] = []
    for part in texts:
        signs = _PLUS_MINUS.search(part)
        expanded += [part] if signs is None else _signed_parts(part, signs).texts
    return _Parts(form, tuple(expanded))


def _column_parts(matrix: str) -> _Parts | None:
    """Returns the entries of a matrix of one row or one column as a vector, or None."""
    rows = [row for row in re.split(r"\\\\", matrix) if row.strip()]
    cells = [row.split("&") for row in rows]
    if len(rows) > 1 and any(len(row) > 1 for row in cells):
        return None
    entries = tuple(cell.strip() for row in cells for cell in row)
    return _Parts("vector", entries) if len(entries) > 1 else None


def _brackets(text: str) -> tuple[str, str]:
    """Returns the form that the brackets around a text say, and the text within them."""
    for opening, closing, form in _BRACKETS:
        if (
            text.startswith(opening)
            and text.endswith(closing)
            and _is_one_group(text, opening, closing)
        ):
            return form, text[len(opening) : len(text) - len(closing)].strip()
    return "several", text


def _named_parts(texts: list[str], form: str) -> _Parts:
    """Returns parts such as x = 2, y = 5 as a point, and x = 2, x = 5 as a set."""
    names: list[str] = []
    values: list[str] = []
    for part in texts:
        match = _NAMED_PART.fullmatch(part)
        name = names[-1] if match is None else match[1]
        names.append(name)
        values.append(part if match is None else match[2].strip())
    if len({*names}) == 1:
        return _Parts("set", tuple(values))
    return _Parts("point" if form == "several" else form, tuple(values), tuple(names))


def _signed_parts(text: str, signs: re.Match[str]) -> _Parts:
    text = re.sub(rf"^{_NAME}\s*=\s*", "", text)
    both = tuple(_PLUS_MINUS.sub(sign, text).strip().lstrip("+").strip() for sign in "+-")
    return _Parts("set", both)


def plain_marks(text: str) -> str:
    """Returns a list without sizes of brackets, words and marks around it."""
    text = re.sub(
        r"\\(?:left|right"
        r"|bigg?[lr]?|Big[lr]?)(?![a-z])\s*",
        "",
        text,
    )
    text = re.sub(r"(?<!\\)\\(?:[ ,;:!]|q?quad\b)", " ", text)
    text = re.sub(r"\\text\{\s*(,?\s*(?:and|or)?)\s*\}", r" \1 ", text)
    text = re.sub(r"\$\s*(,|;|and\b|or\b)\s*\$", r" \1 ", text)
    text = re.sub(r"\\lbrace", r"\\{", re.sub(r"\\rbrace", r"\\}", text))
    text = re.sub(r"\$|\\[()]", " ", text)
    return bare(text.strip()).strip()


def _is_one_group(text: str, opening: str, closing: str) -> bool:
    depth = 0
    at = 0
    while at < len(text):
        if text.startswith(opening, at):
            depth += 1
            at += len(opening)
        elif text.startswith(closing, at):
            depth -= 1
            at += len(closing)
            if depth == 0:
                return at >= len(text)
        else:
            at += 1
    return False


def _outside_groups(text: str) -> str:
    characters = []
    depth = 0
    for character in text:
        depth += character in "([{"
        if depth == 0:
            characters.append(character)
        depth -= character in ")]}"
    return "".join(characters)


def _split(text: str) -> list[str]:
    """Returns the parts between commas, semicolons, "and" and "or" outside of brackets."""
    parts: list[str] = []
    depth = 0
    begin = 0
    at = 0
    while at < len(text):
        character = text[at]
        if depth == 0 and (match := _SEPARATOR.match(text, at)) is not None:
            parts.append(text[begin:at].strip())
            begin = at = match.end()
            continue
        depth += (character in "([{") - (character in ")]}")
        at += 1
    parts.append(text[begin:].strip())
    return [part for part in parts if part]


class Several:
    """Several values: a list, a set, a point or a vector."""

    def __init__(self, parts: _Parts, read: ReadAnswer, *, has_order: bool) -> None:
        self._parts = parts
        self._has_order = has_order
        self._answers = [read(text, "") for text in parts.texts]

    @classmethod
    def read(cls, text: str, question: str, read: ReadAnswer) -> "Several | None":
        parts = parts_of(text)
        return None if parts is None else cls(parts, read, has_order=asks_order(question))

    def agrees(self, phrase: str) -> bool | None:
        readable = False
        for text in _candidates(phrase):
            parts = parts_of(text)
            if parts is None:
                continue
            readable = True
            if parts.form in _MAY_SAY[self._parts.form] and self._same(parts):
                return True
        if readable:
            return False
        # A single value is no list; other words may stand behind the list.
        return False if re.search(r"\d", phrase) else None

    def _same(self, parts: _Parts) -> bool:
        right = self._parts
        if len(parts.texts) != len(right.texts):
            return False
        if parts.names and right.names:
            by_name = dict(zip(parts.names, parts.texts, strict=True))
            return {*parts.names} == {*right.names} and all(
                answer.agrees(by_name[name]) is True
                for name, answer in zip(right.names, self._answers, strict=True)
            )
        is_ordered = right.form in (*_ORDERED, "point") and parts.form not in ("set", "either")
        if is_ordered or (self._has_order and right.form == "several"):
            return all(
                answer.agrees(text) is True
                for answer, text in zip(self._answers, parts.texts, strict=True)
            )
        if (
            parts.form in (*_ORDERED, "point")
            and right.form == "several"
            and parts.form != "closed"
        ):
            return all(
                answer.agrees(text) is True
                for answer, text in zip(self._answers, parts.texts, strict=True)
            )
        return _matched(self._answers, list(parts.texts))


def _matched(answers: list[RightAnswer], texts: list[str]) -> bool:
    """Whether each answer has a text of its own that says it."""
    rest = list(texts)
    for answer in answers:
        match = next((text for text in rest if answer.agrees(text) is True), None)
        if match is None:
            return False
        rest.remove(match)
    return not rest


def _candidates(phrase: str) -> list[str]:
    """Returns the texts in a phrase that may be the list, the shortest last."""
    text = without_aside(phrase)
    short = _TAIL.sub("", core(text))
    segments = re.findall(
        r"\$\$(.+?)\$\$"
        r"|\$([^$]+)\$"
        r"|\\\[(.+?)\\\]"
        r"|\\\((.+?)\\\)",
        text,
    )
    contents = ["".join(segment) for segment in segments]
    texts = [short, *endings(short)[1:], _SUBJECT.sub("", short, count=1)]
    if len(contents) > 1 and _has_few_words(
        re.sub(r"\$[^$]*\$|\\\(.*?\\\)", " ", _SUBJECT.sub("", text))
    ):
        texts.append(", ".join(contents))
    if contents:
        texts.append(contents[-1])
    groups = re.findall(
        r"\\\{[^{}]*\\\}"
        r"|\{[^{}]*,[^{}]*\}"
        r"|\([^()]*,[^()]*\)"
        r"|\[[^\[\]]*,[^\[\]]*\]",
        text,
    )
    outside = text.replace(groups[0], " ") if len(groups) == 1 else ""
    is_alone = re.search(r"\\in\b|∈|\bor\b|\d|[\[(]\s*\S", outside) is None
    if len(groups) == 1 and len(contents) <= 1 and is_alone:
        texts.append(groups[0])
    return [
        plain_words(candidate) if "\\begin" not in candidate else candidate
        for candidate in dict.fromkeys(texts)
    ]


def _has_few_words(text: str) -> bool:
    return all(word.lower() in ("and", "or") for word in re.findall(r"[A-Za-z]{2,}", text))
