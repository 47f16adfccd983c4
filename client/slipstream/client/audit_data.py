"""Looks at what the tasks of an environment ask, and at what they call the right answer."""

import contextlib
import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from slipstream.client.terminal import counted

# Tasks from which the same right answer everywhere is a surprise.
_SEVERAL = 4
# Characters of a text that no other text holds by chance, and those that a line shows.
_LONG = 12
_SHOWN = 60
# Tasks of one environment that are looked for in another one.
_MAX_COMPARED = 512

_NUMBER = r"[-+−]?\s?\\?[$€£]?\s?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?"
_UNIT = r"(?:%|°\s?[CFK]?|[mgshlVWKCFJN]|[A-Za-zµ]{2,12})[²³23]?(?:/[a-z]+|\s[a-z]+)?"
_NOTHING = r"n/?a|none|null|nan|nil|unknown|undefined|missing|tbd|todo|no answer|not known"
# The kinds of answers, of which the first that fits counts.
_KINDS = {
    "no answer": rf"(?i:{_NOTHING})\.?|[-–?.\s]+",
    "JSON": r"\{\s*[\"'].*\}|\[\s*[\"{].*\]",
    "several answers": rf"(?:{_NUMBER}|[A-Z]) or (?:{_NUMBER}|[A-Z])",
    "a number": rf"{_NUMBER}\.?",
    "a letter": r"\(?[A-Z]\)?[.:]?",
    "a number with a unit": rf"{_NUMBER}\s?{_UNIT}",
    "a formula": r".*[\\^=+*/_{}()\[\]<>|].*|[a-z]|\d*[a-z]",
}
# A word, and the names that a formula may have.
_WORD = re.compile(r"[A-Za-z]{4,}")
_NAMES = re.compile(r"\\(?:text|math|operatorname)\w*\s*\{[^{}]*\}|\\[A-Za-z]+|sqrt")
# Kinds of one value each: beside most answers of one of them, another kind is odd.
_STRICT = {"a number", "a letter", "a number with a unit"}
_ASKS_NUMBER = re.compile(
    r"\bhow many\b|\bnumber (?:only|alone)\b|\binteger\b|\b(?:a|one|only the|just the) number\b",
    re.IGNORECASE,
)
_OPTIONS = re.compile(
    r"(?:^|(?<=[\s(]))\(?([A-H])[).:]\s*(\S.*?)\s*(?=$|[\s(]\(?[A-H][).:])", re.DOTALL
)
# An answer that the prompt calls so, one alone behind a question, and one among other words.
_CALLED = (
    r"(?:answer|solution|result|hint|key|label|target|correct|expected)\W{{0,3}}(?:is)?\W{{0,3}}{0}"
    r"(?!\w|\s*(?:[,/|]|or\b)\s*\w)"
)
_ALONE = r"\w(?=\W*[.?!])\W*(?<!\w){0}\W*$"
_NAMED = r"(?<!\w){0}(?!\w)"


# Tags and entities that a page has and a question hardly does.
_HTML = re.compile(
    r"</?(?:p|br|div|span|em|strong|sup|sub|ul|ol|li|table|tr|td|img)(?:\s[^<>]*)?/?>"
    r"|&(?:nbsp|amp|lt|gt|quot|#\d+);"
)
# Commands of LaTeX whose backslash was read as the beginning of a control character, or dropped.
_NO_BACKSLASH = re.compile(
    r"(?<![\\\w])(?:f?rac|sqrt|boxed|textbf|mathrm)\{|[\x07-\x09\x0b-\x0d](?:rac|ext|imes|oxed|heta)\b"
)
# A prompt's arithmetic of two whole numbers.
_SUM = re.compile(r"(?<![\w.)^/*+-])(\d{1,9}) ?([-+*×]) ?(\d{1,9})(?![\w.(^/*+-]|\s[-+*/×])")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "×": operator.mul}
# Answers that must belong to the prompts of neighbours, and how many times as many as to their own.
_SHIFTED = 8
_FAR_MORE = 4
# A prompt that asks for the letter of an option, not for its text.
_ASKS_LETTER = re.compile(
    r"\b(?:reply|answer|respond|end|write|give|say|choose|output|return|state)\b[^.\n]{0,40}"
    r"\b(?:letters?|A, B, C(?:,| or))(?! and )\b",
    re.IGNORECASE,
)
_CUT_DECIMALS = re.compile(r"-?\d+\.")


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
    yield from _repeated(rows, is_interactive=is_interactive)
    solved = [row for row in rows if row.right]
    yield from _uneven(solved)
    answered = [row for row in solved if row.answer.strip()]
    yield from _odd(answered)
    yield from _damaged(rows, answered)
    yield from _shifted(answered)
    if revealed := [*_told(answered), *_said_before(solved)]:
        yield f"the prompt holds the right answer in {_such_as(revealed, solved)}"
    if solved and len(solved) < len(rows):
        lacking = [row.index for row in rows if not row.right]
        yield f"{of(len(lacking), len(rows))}, such as task {lacking[0]}, have no right answer"


def _repeated(rows: Sequence[Row], *, is_interactive: bool) -> Iterator[str]:
    """Yields the gravest of: a task without a text, two that ask the same, two that nearly do."""
    shown = [row for row in rows if row.said and not row.has_images]
    blank = [row for row in shown if not row.text.strip()]
    earliest: dict[str, Row] = {}
    pairs = [(earliest.setdefault(key_of(row.text), row), row) for row in shown]
    differing = [pair for pair in pairs if key_of(pair[0].right) != key_of(pair[1].right)]
    alike = [
        (first_row, second_row)
        for first_row, second_row in pairs
        if first_row.text != second_row.text
    ]
    if blank:
        yield f"task {blank[0].index} begins without a text"
    elif differing and not is_interactive:
        first_row, second_row = differing[0]
        tasks = f"tasks {first_row.index} and {second_row.index}"
        what = f"{tasks} ask the same, {quoted(first_row.prompt)}, with"
        yield f"{what} the answers {quoted(first_row.right)} and {quoted(second_row.right)}"
    elif alike and not is_interactive:
        first_row, second_row = alike[0]
        what = f"{of(len(alike), len(rows))} ask what another one asks but for spaces and case"
        tasks = f"tasks {first_row.index} and {second_row.index}"
        yield f"{what}, such as {tasks}, {quoted(first_row.prompt)}"


def _uneven(solved: Sequence[Row]) -> Iterator[str]:
    """Yields what stands out among the right answers: one for all, a long one, a question."""
    if len(solved) >= _SEVERAL and len({row.right for row in solved}) == 1:
        yield f"the right answer is the same in all {len(solved)} tasks: {quoted(solved[0].right)}"
    longest = sorted(solved, key=lambda row: len(row.answer))
    if longest and len(longest[-1].answer) > 20 * max(
        len(longest[len(longest) // 2].answer), _LONG
    ):
        what = f"task {longest[-1].index} is far longer than others"
        yield f"the right answer of {what}: {quoted(longest[-1].answer)}"
    answered = [row for row in solved if row.answer.strip()]
    asking = [row for row in answered if row.answer.strip().endswith("?") and "?" not in row.prompt]
    if 2 * len(asking) > len(answered):
        yield f"the right answer asks, and the prompt does not, in {_such_as(asking, answered)}"


def _damaged(rows: Sequence[Row], answered: Sequence[Row]) -> Iterator[str]:
    """Yields lines on texts that a conversion has damaged."""
    cut = [row for row in answered if _CUT_DECIMALS.fullmatch(row.answer.strip())]
    if cut:
        yield f"the right answer ends with its decimal point in {_such_as(cut, answered)}"
    mistaken = [row for row in rows if _is_mojibake(row.text) or _is_mojibake(row.answer)]
    if mistaken:
        yield f"UTF-8 was read as another encoding in {_such_as(mistaken, rows)}"
    html = [row for row in rows if _HTML.search(row.text) and "html" not in row.text.casefold()]
    if html:
        yield f"the prompt has HTML in {_such_as(html, rows)}"
    latex = [row for row in rows if _NO_BACKSLASH.search(f"{row.text}\n{row.answer}")]
    if latex:
        yield f"LaTeX has lost its backslashes in {_such_as(latex, rows)}"


def _shifted(answered: Sequence[Row]) -> Iterator[str]:
    """Yields a line if answers belong to the prompts of neighbours rather than to their own."""
    num_fitting = sum(_belongs(row.answer, row.prompt) for row in answered)
    by_index = {row.index: row for row in answered}
    for shift, side in ((-1, "before"), (1, "behind")):
        strangers = []
        for row in answered:
            neighbour = by_index.get(row.index + shift)
            if neighbour is None or key_of(neighbour.answer) == key_of(row.answer):
                continue
            if _belongs(row.answer, neighbour.prompt):
                strangers.append(row)
        if len(strangers) >= _SHIFTED and len(strangers) > _FAR_MORE * num_fitting:
            some = _such_as(strangers, answered)
            yield (
                f"right answers look shifted by one row: those of {some}, belong to the prompt "
                f"{side} them, and {num_fitting} to their own"
            )


def _belongs(answer: str, prompt: str) -> bool:
    """Whether an answer is an option or the one sum of a prompt, or names words of it alone."""
    if options := _options(prompt):
        return key_of(answer) in map(key_of, options.values())
    sums = _SUM.findall(prompt)
    if len(sums) == 1:
        first, sign, second = sums[0]
        return answer.strip() == str(_OPERATIONS[sign](int(first), int(second)))
    words = _WORD.findall(answer.casefold())
    return bool(words) and set(words) <= set(_WORD.findall(prompt.casefold()))


def _is_mojibake(text: str) -> bool:
    """Whether a part of the text is UTF-8 whose bytes were taken for letters of Windows."""
    for part in re.findall(r"[^\x00-\x7f]{2,}", text):
        with contextlib.suppress(UnicodeError):
            part.encode("cp1252").decode()
            return True
    return False


def _odd(rows: Sequence[Row]) -> Iterator[str]:
    """Yields lines on answers of another kind than the prompt asks, or than most others have."""
    if misfits := [row for row in rows if not _fits(row)]:
        where = _such_as(misfits, rows)
        yield f"the right answer is not of the kind that the prompt asks in {where}"
    kinds = [_kind(row.answer) for row in rows]
    count = Counter(kinds)
    usual_kind = count.most_common(1)[0][0] if rows else ""
    odd = {"no answer", "JSON"}
    if usual_kind in odd:
        odd = {*count}
    elif usual_kind in _STRICT:
        # Mathematics has answers of many kinds, and few texts among numbers are no answers.
        odd |= {"several answers"} | (_STRICT if count["a formula"] * 10 < len(rows) else set())
        odd |= {"a text"} if count["a text"] * 4 <= len(rows) else set()
    elif usual_kind == "a text" and 2 * len({row.answer for row in rows}) <= len(rows):
        # Answers are out of a few labels.
        odd -= {"no answer"}
    odd_rows = [
        (row, kind)
        for row, kind in zip(rows, kinds, strict=True)
        if kind in odd and kind != usual_kind
    ]
    if odd_rows:
        what = " or ".join(sorted({kind for _, kind in odd_rows}))
        where = _such_as([row for row, _ in odd_rows], rows)
        yield f"the right answer is {what}, where most are {usual_kind}, in {where}"


def _kind(answer: str) -> str:
    fits = (kind for kind, form in _KINDS.items() if re.fullmatch(form, answer.strip(), re.DOTALL))
    kind = next(fits, "a text")
    return "a text" if kind == "a formula" and _WORD.search(_NAMES.sub("", answer)) else kind


def _fits(row: Row) -> bool:
    """Whether the answer is of the kind that the prompt asks: an option of it, or a number."""
    if options := _options(row.prompt):
        letters = {*re.findall(r"\b[A-H]\b", row.answer)}
        if letters and letters <= options.keys():
            return True
        if _ASKS_LETTER.search(row.prompt) is not None:
            return False
        text = re.escape(key_of(row.answer))
        return any(re.match(rf"{text}(?!\w)", key_of(option)) for option in options.values())
    return _kind(row.answer) in ("a number", "a formula") or _ASKS_NUMBER.search(row.prompt) is None


def _options(prompt: str) -> dict[str, str]:
    """Returns the lettered options of a prompt, by their letters, or {}."""
    options = dict(_OPTIONS.findall(prompt))
    return options if {"A", "B"} <= options.keys() else {}


def _told(rows: Sequence[Row]) -> list[Row]:
    """Returns rows whose prompts hold the answer, more often than they hold that of others."""
    common = Counter(message for row in rows for message in row.said)
    # Instructions that stand in one row alone.
    instructions = [
        "\n".join(
            message[1] for message in row.said if message[0] == "system" and common[message] == 1
        )
        for row in rows
    ]
    texts = [row.text for row in rows]
    indices = {
        row.index
        for row in rows
        if len(row.answer) >= _LONG and row.answer in row.text and not _options(row.prompt)
    }
    for form, places in ((_CALLED, texts), (_ALONE, texts), (_NAMED, instructions)):
        revealed = {
            row.index
            for row, text in zip(rows, places, strict=True)
            if _holds(text, form, row.answer)
        }
        by_chance = sum(
            _holds(text, form, other.answer) and key_of(row.answer) != key_of(other.answer)
            for row, other, text in zip(
                rows,
                [*rows[1:], *rows[:1]],
                places,
                strict=True,
            )
        )
        indices |= revealed if len(revealed) > 2 * by_chance else set()
    return [row for row in rows if row.index in indices]


def _said_before(rows: Sequence[Row]) -> list[Row]:
    """Returns rows without an answer in which a reply of the prompt is the right one."""
    return [
        row
        for row in rows
        if not row.answer.strip()
        and any(
            role == "assistant" and key_of(text.strip()) == key_of(row.reply.strip())
            for role, text in row.said
        )
    ]


def _holds(text: str, form: str, answer: str) -> bool:
    pattern = re.escape(answer.strip())
    return bool(text) and re.search(form.format(pattern), text, re.IGNORECASE) is not None


def key_of(text: str) -> str:
    """Returns a text in single spaces and small letters, but for words of one letter."""
    return re.sub(r"\w{2,}", lambda word: word[0].casefold(), " ".join(text.split()))


def shared_questions(
    heldout: Sequence[tuple[str, str]], trained: Sequence[tuple[str, str]]
) -> tuple[int, int]:
    """Returns how many of `heldout` were looked at, and how many of these are in `trained` too.

    Each is the key of a prompt and the right answer. What all prompts of one side begin and end
    with, such as an instruction, makes no difference.
    """
    heldout = heldout[:: max(1, -(-len(heldout) // _MAX_COMPARED))]
    trained_of: dict[str, list[tuple[str, str]]] = {}
    for (text, answer), core in zip(trained, _cores(trained), strict=True):
        trained_of.setdefault(answer, []).append((text, core))
    shared = sum(
        any(
            text == other
            or (len(other) >= _LONG and other in text)
            or (len(text) >= _LONG and text in other)
            or (" " in core and " " in other_core and other_core in text and core in other)
            for other, other_core in trained_of.get(answer, ())
        )
        for (text, answer), core in zip(heldout, _cores(heldout), strict=True)
    )
    return len(heldout), shared


def _cores(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the texts without what all of them begin and end with."""
    texts = [text for text, _ in rows]
    start = len(commonprefix(texts)) if len(texts) > 1 else 0
    end = len(commonprefix([text[start:][::-1] for text in texts])) if len(texts) > 1 else 0
    return [text[start : len(text) - end].strip() for text in texts]


def of(number: int, total: int) -> str:
    """Returns how many of all tasks."""
    return f"{number} of {counted(total, 'task')}"


def _such_as(some: Sequence[Row], rows: Sequence[Row]) -> str:
    where = f"{of(len(some), len(rows))}, such as task {some[0].index}"
    return f"{where}, {quoted(some[0].prompt)}, right {quoted(some[0].right)}"


def quoted(text: str) -> str:
    """Returns a text in quotes on one line, cut where it is long."""
    text = " ".join(text.split())
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
