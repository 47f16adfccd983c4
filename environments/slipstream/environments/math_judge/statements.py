"""Finds what a reply states last: in tags, JSON, boxes, behind "answer is", or in its sentences."""

import re
from dataclasses import dataclass

from slipstream.environments.answers import (
    ANSWER_MARKS,
    ANSWER_WORDS,
    FIRST_LINE,
    TAGGED,
    boxed,
    packed_answer,
    plain,
)

# Punctuation of the sentence that stands inside a formula: \[\frac{3}{4}.\]
_INNER_STOP = re.compile(r"(?<!\\)[.,;:]++\s*(?=\\\]|\\\)|\$\$)|(?<![\\.])[.,;](?=\$(?!\d))")
_FACTORIAL = re.compile(r"([\d)}])!(?=\s|$)")
_DISPLAY = re.compile(r"\\\[.*?\\\]|\$\$.*?\$\$", re.DOTALL)
_ENVIRONMENT = re.compile(r"\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL)
# Space of LaTeX between a number and its unit, and the commands around words.
_UNIT_SPACE = re.compile(
    r"(?:\\[,;:! ]|\\q?quad\b|~|\s)++(?=\\(?:text|mathrm|rm|mbox|operatorname)\b)"
)
_JOINING_WORD = re.compile(r"\s*\\(?:text|mathrm|mbox)\s*\{\s*(and|or)\s*\}\s*")
_WORDS_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname|bf|rm)"
    r"\s*\{([^{}]*)\}"
)

_STATED = re.compile(
    rf"(?:\b(?:(?:answer|option|choice|{ANSWER_WORDS})(?: corre[ct]ta| final(?:e)?| correcte)?"
    r"(?:(?: to(?: \w+){1,4})? (?:is|should be|must be|would be|will be|equals)\b"
    r"| ist?\b| lautet\b| est?\b| [eé]\b| è|\s*:| =| -(?= [A-Z(*]))"
    r"|(?:(?<=\n)|(?<=\A))(?:final )?(?:solution|result|conclusion) ?:(?![^\n]*\n\s*\S))"
    r"|(?<!#)####(?!#)"
    rf"|{ANSWER_MARKS})\s*:?\s*\}}?\s*"
    r"(?:(?:\\\[|\$\$)\s*\n\s*)?(.*?)(?=[.!?](?:\s|$)|\n|$)([.!?]?)",
    re.IGNORECASE,
)
# Words behind "the answer is" that say something about it, and do not give it.
_ABOUT = re.compile(
    r"(?:indeed |therefore |thus |also )?(?:correct|right|consistent|verified|reasonable|unique"
    r"|as (?:follows|expected)|in (?:the|\\boxed)|the same|now|wrong|incorrect|confirmed|valid"
    r"|boxed|above|shown|written|clear|simple|found|obtained|given by)\b",
    re.IGNORECASE,
)
# Words that take a statement back, so that the next one counts.
_TAKEN_BACK = re.compile(
    r"\b(?:that|this|it|which|the above|the answer|the result|my (?:answer|result|calculation))"
    r"(?:'s| is| was)(?: (?:all|clearly|actually))? (?:not (?:right|correct)|wrong|incorrect|false"
    r"|an? (?:mistake|error))\b"
    r"|\bi (?:made (?:a|an) (?:\w+ )?(?:mistake|error)|was wrong|got (?:that|it) wrong|misread)\b"
    r"|\b(?:wait|actually|sorry|correction|oops|scratch that|on second thought)\b[,:.!]*+"
    r"(?: no\b[,:.]*+)?\s++(?:it(?:'s| is| should be| must be)|that(?:'s| is)"
    r"|the (?:\w+ ){1,3}(?:is|should be|must be)|this (?:is|should be)|i (?:mean|meant))\s",
    re.IGNORECASE,
)
# The end of a sentence. "p.m. The" ends one, "3.5" and "a.m. and" do not.
_SENTENCE_END = re.compile(
    r"(?<=[.!?。])(?<!\b[A-Z]\.)\s+(?=[A-Z\\$(*\u3040-\u9fff-])|(?<=[。])|\n+"
)


@dataclass(frozen=True)
class Statement:
    """What a reply states, the newest phrase first, as `plain` writes it.

    `is_marked` says that the first phrase stands in a box, a tag or behind "answer is"; otherwise
    phrases are the sentences of the reply. `reply` is the whole reply as it was written.
    """

    phrases: tuple[str, ...]
    is_marked: bool
    reply: str = ""


def readable(text: str) -> str:
    """Returns `text` as `plain` does, with formulas and units in one form.

    A formula loses the full stop inside it, and a unit in LaTeX becomes its letters.
    """
    text = re.sub(r"\\(?:display|text)style\b\s*", "", text)
    text = _UNIT_SPACE.sub(" ", _JOINING_WORD.sub(r" \1 ", text))
    text = plain(text)
    for form in (_DISPLAY, _ENVIRONMENT):
        text = form.sub(lambda formula: formula[0].replace("\n", " "), text)
    return _INNER_STOP.sub("", text)


def without_words_commands(text: str) -> str:
    r"""Returns `text` with the content of \text{...} and its like in place of the command."""
    for _ in range(3):
        text = _WORDS_COMMAND.sub(r"\1", text)
    return text


def final_statement(reply: str, *, keeps_factorial: bool = False) -> Statement:
    """Returns what a reply states last. A statement that is taken back does not count.

    "The answer is 7!" states 7, and 7! if `keeps_factorial`.
    """
    text = readable(reply)
    if keeps_factorial:
        text = _FACTORIAL.sub(r"\1!{}", text)
    phrases, rest = _marked(text)
    taken_back = None if phrases is None else _TAKEN_BACK.search(rest)
    if taken_back is not None:
        text = rest[taken_back.start() :]
        phrases, _ = _marked(text)
    if phrases is None:
        return Statement(_sentences(text), is_marked=False, reply=reply)
    return Statement(phrases, is_marked=True, reply=reply)


def _marked(text: str) -> tuple[tuple[str, ...] | None, str]:
    """Returns the last marked answers, the newest first, and the text behind them."""
    tags = list(TAGGED.finditer(text))
    if tags:
        inside = tags[-1][2].strip()
        phrases, _ = _marked(inside)
        return phrases or (inside,), text[tags[-1].end() :]
    if (packed := packed_answer(text)) is not None:
        return (packed,), ""
    if (box := boxed(text)) is not None:
        content, end = box
        rest = text[end:]
        # A sentence behind the box may give another answer.
        stated = _stated(rest)
        if stated is None:
            return (content,), rest
        is_taken_back = _TAKEN_BACK.search(rest) is not None
        return (stated[:1] if is_taken_back else (stated[0], content)), stated[1]
    if (stated := _stated(text)) is not None:
        return (stated[0],), stated[1]
    if (first := FIRST_LINE.match(text)) is not None:
        return (first[1].strip(),), ""
    return None, text


def _stated(text: str) -> tuple[str, str] | None:
    """Returns what the last "the answer is" states, and the text behind it."""
    for match in reversed(list(_STATED.finditer(text))):
        content = match[1].strip()
        end = match[2]
        if content and end != "?" and _ABOUT.match(content) is None:
            return content, text[match.end() :]
    return None


def _sentences(text: str) -> tuple[str, ...]:
    parts = [part.strip() for part in _SENTENCE_END.split(text)]
    return tuple(reversed([part for part in parts if re.search(r"[\w∅ℝ\\]", part)]))
