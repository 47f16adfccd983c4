"""Intervals and their unions, also as inequalities of one letter."""

import re
from fractions import Fraction
from typing import NamedTuple

from slipstream.environments.math_judge.expressions import same_expression, value_of
from slipstream.environments.math_judge.formulas import as_latex, plain_words
from slipstream.environments.math_judge.lists import plain_marks
from slipstream.environments.math_judge.numerals import number_in, same_number
from slipstream.environments.math_judge.phrases import core, endings, without_aside

_LESS = r"(<=|≤|\\leq?(?:slant)?(?![a-z])|<|\\lt(?![a-z]))"
_MORE = r"(>=|≥|\\geq?(?:slant)?(?![a-z])|>|\\gt(?![a-z]))"
_LETTER = r"(?:[A-Za-z](?:\([a-z]\))?|\\(?:theta|alpha|beta|lambda|mu|phi))"
_BETWEEN = re.compile(rf"([^<>=]+?)\s*{_LESS}\s*{_LETTER}\s*{_LESS}\s*([^<>=]+)")
_DOWN = re.compile(rf"([^<>=]+?)\s*{_MORE}\s*{_LETTER}\s*{_MORE}\s*([^<>=]+)")
_ANY = r"(<=|>=|≤|≥|\\[lg]eq?(?:slant)?(?![a-z])|<|>|\\[lg]t(?![a-z]))"
_ONE_SIDED = re.compile(rf"{_LETTER}\s*{_ANY}\s*(?P<bound>[^<>=]+)")
_MIRRORED = re.compile(rf"(?P<bound>[^<>=]+?)\s*{_ANY}\s*{_LETTER}")
_UNEQUAL = re.compile(
    rf"{_LETTER}\s*(?:\\neq?(?![a-z])"
    rf"|≠|!=)\s*(.+)"
)
_INTERVAL = re.compile(
    r"([(\[])\s*([^(),\[\]]+(?:\([^()]*\)[^(),\[\]]*)?)\s*[,;]\s*([^,\[\]]+?)\s*([)\]])"
)
_BUILDER = re.compile(
    r"\\?\{\s*" + _LETTER + r"(?:\s*(?:\\in"
    r"|∈)\s*(?:\\mathbb\s*\{?R\}?|ℝ|R))?" + r"\s*(?:\||:|\\mid\b"
    r"|\\vert\b|\\colon\b)\s*(.*?)\s*\\?\}"
)
_REALS = re.compile(
    r"(?:x\s*(?:\\in"
    r"|∈)\s*)?(?:\\mathbb\s*\{?\s*R\s*\}?|ℝ|\\R"
    r"|(?:the set of )?all (?:the )?real(?:s"
    r"| numbers)(?: x)?)",
    re.IGNORECASE,
)
_EXCEPT = re.compile(
    r"\s*(?:\\setminus"
    r"|\\backslash"
    r"|∖|except(?: for)?"
    r"|excluding|other than|but not"
    r"|\\ (?=\\?\{)|-(?=\s*\\?\{))\s*"
)
_UNION = re.compile(
    r"\s*(?:\\cup(?![a-z])"
    r"|∪|\bU\b|\bunion\b"
    r"|\bor\b|\\lor\b"
    r"|\\vee\b|∨|\|\|)\s*"
)
_BOTH = re.compile(
    r"\s*(?:\band\b"
    r"|\\land\b|\\wedge\b"
    r"|∧|&&)\s*"
)
# Words of a question that asks for an interval; otherwise (2, 5) is a point.
_ASKS_INTERVAL = re.compile(
    r"interval|inequalit"
    r"|domain|\brange"
    r"|solution set"
    r"|[<>≤≥]|\\[lg]eq?\b"
    r"|\ball (?:real "
    r"|possible )?(?:values"
    r"|x\b|numbers)",
    re.IGNORECASE,
)
_SIGNED = re.compile(rf"\s*{_ANY}\s*([^<>=]+)")


# Bounds in words, with their signs; the longer ones first.
_SPOKEN_BOUNDS = (
    (r"(?:greater|larger|more) than or equal to|at least|no (?:less|smaller) than", r"\ge"),
    (r"(?:less|smaller) than or equal to|at most|no (?:more|greater|larger) than", r"\le"),
    (r"(?:strictly )?(?:greater|larger|more) than", ">"),
    (r"(?:strictly )?(?:less|smaller) than", "<"),
)
_ABSOLUTE = re.compile(rf"\|\s*({_LETTER})\s*\|\s*{_LESS}\s*([^<>=|]+)")


class Span(NamedTuple):
    """An interval by the formulas of its ends, and whether they belong to it."""

    low: str
    has_low: bool
    high: str
    has_high: bool


class Intervals:
    """An interval or a union of intervals."""

    def __init__(self, spans: tuple[Span, ...], *, is_closed_pair: bool = False) -> None:
        self._spans = spans
        self._is_closed_pair = is_closed_pair

    @classmethod
    def read(cls, text: str, question: str) -> "Intervals | None":
        text = _plain(text)
        is_asked = _ASKS_INTERVAL.search(question) is not None
        spans = spans_of(text)
        if not spans:
            return None
        pair = re.fullmatch(
            r"\([^()]*,[^()]*\)"
            r"|\[[^\[\]]*,[^\[\]]*\]",
            text,
        )
        is_open_pair = pair is not None and text[0] == "(" and "infty" not in text
        if is_open_pair and not is_asked:
            return None
        is_closed_pair = pair is not None and text[0] == "[" and not is_asked
        if is_closed_pair and not all(_is_ordered(span) for span in spans):
            return None
        return cls(spans, is_closed_pair=is_closed_pair)

    def agrees(self, phrase: str) -> bool | None:
        readable = False
        text = without_aside(phrase)
        short = core(text)
        segments = re.findall(
            r"\$\$(.+?)\$\$"
            r"|\$([^$]+)\$"
            r"|\\\[(.+?)\\\]"
            r"|\\\((.+?)\\\)",
            text,
        )
        contents = ["".join(segment) for segment in segments]
        joined = _joined(text)
        for candidate in dict.fromkeys([short, *endings(short), joined, *contents[-1:]]):
            spans = spans_of(_plain(candidate))
            if not spans:
                continue
            readable = True
            if candidate in contents and re.search(r"\bor\b|∪|\\cup", text.replace(candidate, "")):
                continue
            if _same_spans(self._spans, spans):
                return True
        return False if readable or re.search(r"\d", phrase) else None


def _plain(text: str) -> str:
    text = plain_marks(text)
    text = re.sub(
        r"\\(?:infin|infty)\b\s*"
        r"|∞|\binf(?:inity|ty)?\b",
        r"\\infty ",
        text,
    )
    text = re.sub(r"\+\s*\\infty", r"\\infty", text)
    for words, sign in _SPOKEN_BOUNDS:
        template = sign.replace("\\", r"\\")
        text = re.sub(rf"(?:\bis |\bmust be )?\b(?:{words})\b", template, text)
    text = _ABSOLUTE.sub(r"-(\3) \2 \1 \2 \3", text)
    return plain_words(text) if "\\mathbb" not in text else text


def _joined(text: str) -> str:
    """Returns a sentence such as "$x<0$ or $x>1$" without its dollars and first words."""
    text = re.sub(r"\$|\\[()]", " ", text)
    match = re.search(
        rf"(?:\S+\s*{_LESS}\s*)?(?<![A-Za-z\\]){_LETTER}\s*{_ANY}.*"
        rf"|[(\[][^()\[\]]*,[^()\[\]]*[)\]].*",
        text,
    )
    return "" if match is None else match[0].strip(" .")


def spans_of(text: str) -> tuple[Span, ...]:
    """Returns the intervals that a text writes, () if it writes none or something else too."""
    text = text.strip()
    if (builder := _BUILDER.fullmatch(text)) is not None:
        return spans_of(builder[1])
    text = re.sub(rf"^{_LETTER}\s*(?:\\in\b|∈|\bin\b)\s*", "", text)
    text = re.sub(r"^[A-Z]\s*=\s*(?=[(\[])", "", text)
    parts = _EXCEPT.split(text)
    if len(parts) == 2 and _REALS.fullmatch(parts[0].strip()):
        points = [
            point for point in re.split(r",|\band\b", parts[1].strip("{}\\ .")) if point.strip()
        ]
        points = [re.sub(rf"^{_LETTER}\s*=\s*", "", point.strip()) for point in points]
        return _without(points)
    if _REALS.fullmatch(text):
        return (Span(r"-\infty", False, r"\infty", False),)
    spans: list[Span] = []
    unequal = [_UNEQUAL.fullmatch(part.strip()) for part in re.split(r",|\band\b", text)]
    if all(match is not None for match in unequal):
        return _without([match[1] for match in unequal if match is not None])
    for part in _UNION.split(text):
        span = _span(part.strip())
        if span is None:
            return ()
        spans.append(span)
    return tuple(spans)


def _without(points: list[str]) -> tuple[Span, ...]:
    """Returns the real numbers without some points."""
    ordered = sorted(points, key=lambda point: _size(point))
    ends = [r"-\infty", *ordered, r"\infty"]
    return tuple(Span(low, False, high, False) for low, high in zip(ends, ends[1:], strict=False))


def _span(text: str) -> Span | None:
    text = re.sub(rf"^{_LETTER}\s*(?:\\in\b|∈|\bin\b)\s*", "", text)
    if (interval := _INTERVAL.fullmatch(text)) is not None:
        opening, low, high, closing = interval.groups()
        return Span(low, opening == "[", high, closing == "]")
    if (between := _BETWEEN.fullmatch(text)) is not None:
        low, first, second, high = between.groups()
        return Span(low, _is_closed(first), high, _is_closed(second))
    if (down := _DOWN.fullmatch(text)) is not None:
        high, first, second, low = down.groups()
        return Span(low, _is_closed(second), high, _is_closed(first))
    both = _BOTH.split(text)
    if len(both) == 2:
        first_span = _span(both[0])
        second_span = _span(both[1])
        if first_span is None or second_span is None:
            return None
        return _intersection(first_span, second_span)
    one_sided = _ONE_SIDED.fullmatch(text)
    match = one_sided or _MIRRORED.fullmatch(text)
    if match is None:
        return None
    sign = match[1] if one_sided is not None else match[2]
    bound = match["bound"].strip()
    if re.search(r"[,;]", bound):
        return None
    is_above = sign[0] in ">≥" or sign.startswith("\\g")
    if is_above == (one_sided is not None):
        return Span(bound, _is_closed(sign), r"\infty", False)
    return Span(r"-\infty", False, bound, _is_closed(sign))


def _intersection(first: Span, other: Span) -> Span | None:
    """Returns the interval of "x > 1 and x < 3", None of bounds on the same side."""
    for lower, upper in ((first, other), (other, first)):
        if lower.high == r"\infty" and upper.low == r"-\infty":
            span = Span(lower.low, lower.has_low, upper.high, upper.has_high)
            return span if _is_ordered(span) else None
    return None


def _is_closed(sign: str) -> bool:
    return sign not in ("<", ">", "\\lt", "\\gt")


def _is_ordered(span: Span) -> bool:
    return _size(span.low) < _size(span.high)


def _size(bound: str) -> float:
    if "\\infty" in bound:
        return -float("inf") if "-" in bound else float("inf")
    value = _value(bound)
    return 0.0 if value is None else float(value)


def _value(bound: str) -> Fraction | None:
    value = number_in(bound, reads_words=False)
    return value_of(bound) if value is None else value


def _same_spans(right: tuple[Span, ...], spans: tuple[Span, ...]) -> bool:
    if len(right) != len(spans):
        return False
    pairs = zip(
        *(
            sorted(spans_of_side, key=lambda span: _size(span.low))
            for spans_of_side in (right, spans)
        ),
        strict=True,
    )
    return all(
        first.has_low == other.has_low
        and first.has_high == other.has_high
        and _same_bound(first.low, other.low)
        and _same_bound(first.high, other.high)
        for first, other in pairs
    )


def _same_bound(first: str, other: str) -> bool:
    if "\\infty" in first or "\\infty" in other:
        return _size(first) == _size(other) and "\\infty" in first and "\\infty" in other
    if re.sub(r"\s", "", as_latex(first)) == re.sub(r"\s", "", as_latex(other)):
        return True
    value = _value(first)
    other_value = _value(other)
    if value is not None and other_value is not None:
        return same_number(value, other_value)
    return same_expression(first, other) is True


class Bound:
    """A bound without a letter, such as > 18."""

    def __init__(self, sign: str, bound: str) -> None:
        self._sign = sign
        self._bound = bound

    @classmethod
    def read(cls, text: str) -> "Bound | None":
        match = _SIGNED.fullmatch(_plain(text))
        return None if match is None else cls(_sign(match[1]), match[2])

    def agrees(self, phrase: str) -> bool | None:
        text = re.sub(rf"^{_LETTER}\s*(?=[<>≤≥\\])", "", _plain(core(phrase)))
        match = _SIGNED.fullmatch(text)
        if match is None:
            return False if re.search(r"\d", text) else None
        return _sign(match[1]) == self._sign and _same_bound(self._bound, match[2])


def _sign(sign: str) -> str:
    direction = "<" if sign[0] in "<≤" or sign.startswith("\\l") else ">"
    return direction + ("=" if _is_closed(sign) else "")
