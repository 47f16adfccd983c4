"""Reads numbers as people and programs write them, each as an exact fraction."""

import re
from fractions import Fraction

from slipstream.environments.answers import bare

# Parts of their size by which two numbers are no longer the same, however small they are.
_APART = Fraction(1, 1000)
# Numbers that agree in so many places are the same: 0.333333 is 1/3.
_NEAR = Fraction(1, 2 * 10**6)
# No answer has a longer number, and no reply makes this process count further.
MAX_DIGITS = 300
MAX_EXPONENT = 300

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SMALL = {word: number for number, word in enumerate(_ONES)}
_SMALL |= {word: 10 * number for number, word in enumerate(_TENS, start=2)}
_SCALES = {
    "hundred": 100,
    "dozen": 12,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_PARTS = {
    "half": 2,
    "halve": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
    "hundredth": 100,
    "thousandth": 1000,
}
_PERCENT = r"(?:\s*\\?%|\s*per ?cent(?:age points?)?)"
_DIGITS = r"(?:\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(rf"(-?)\s*({_DIGITS})({_PERCENT})?", re.IGNORECASE)
_DECIMAL_COMMA = re.compile(rf"(-?)(\d+),(\d{{1,2}}|\d{{4,}}|(?<=\b0,)\d+)({_PERCENT})?")
_TERM = rf"(-?{_DIGITS})"
_RATIONAL = re.compile(
    rf"(-?)\s*(?:(\d+)\s*)?\\[dtc]?frac\s*\{{\s*{_TERM}\s*\}}\s*\{{\s*{_TERM}\s*\}}"
    rf"|(-?)\s*(?:(\d+)\s+)?\(?{_TERM}\s*/\s*{_TERM}\)?"
)
# 0.1\overline{6}, whose last digits repeat without end.
_REPEATING = re.compile(
    r"(-?)(\d*)\.(\d*)"
    r"\\(?:overline|bar|dot)"
    rf"\s*\{{?(\d+)\}}?({_PERCENT})?"
)
_PERCENTAGE = re.compile(rf"(.*\d.*?[\d}}]){_PERCENT}", re.IGNORECASE)
_SHORT_FRACTION = re.compile(r"\\([dtc]?frac)\s*(\d)\s*(\d)")
_HALF_SHORT_FRACTION = re.compile(r"\\([dtc]?frac)\s*(?:\{(\d+)\}\s*(\d)|(\d)\s*\{(\d+)\})")
_SCIENTIFIC = re.compile(
    rf"(-?{_DIGITS})\s*(?:\\times|\\cdot|[x*])\s*10\s*(?:\^|\*\*)\s*\{{?\s*([-+]?\d{{1,4}})\s*\}}?"
    rf"|(-?{_DIGITS})[eE]([-+]?\d{{1,4}})"
)
_SCALED = re.compile(rf"({_TERM}) +({'|'.join(_SCALES)})s?", re.IGNORECASE)
_OVER = re.compile(r"(-?\d+) (?:over|out of|in every) (\d+)", re.IGNORECASE)
_ORDINAL = re.compile(r"(\d+)(?:st|nd|rd|th)")


def same_number(one: Fraction, other: Fraction) -> bool:
    """Whether two numbers are equal, or agree in six places and nearly all of their size."""
    difference = abs(one - other)
    largest = max(abs(one), abs(other))
    return difference == 0 or (difference <= _NEAR and difference <= _APART * largest)


def number_in(
    text: str, *, reads_words: bool = True, reads_decimal_comma: bool = True
) -> Fraction | None:
    """Returns the number that the whole text is, or None.

    A percentage is a part of one hundred. A comma before other than three digits is a decimal one,
    unless commas separate numbers.
    """
    text = bare(text).replace("\\left", "").replace("\\right", "").strip()
    text = text.replace("\\!", "").replace("{,}", "").lstrip("=≈~ ")
    text = re.sub(r"^\\approx\s*", "", text)
    if not text or len(text) > MAX_DIGITS:
        return None
    text = re.sub(r"^\{?\s*(-?\d+)\s*\\over\s*(\d+)\s*\}?$", r"\1/\2", text)
    text = _SHORT_FRACTION.sub(r"\\\1{\2}{\3}", text)
    text = _HALF_SHORT_FRACTION.sub(r"\\\1{\2\4}{\3\5}", text)
    text = re.sub(r"^[({]+(-?[^(){},]*)[)}]+$", r"\1", text).strip()
    text = re.sub(r"^-\s+(?=\d)", "-", text)
    if (decimal := _DECIMAL.fullmatch(text)) is not None:
        sign, digits, percent = decimal.groups()
        return _signed(sign, Fraction(digits.rstrip(".") or "0")) / (100 if percent else 1)
    if reads_decimal_comma and (decimal := _DECIMAL_COMMA.fullmatch(text)) is not None:
        sign, integer, part, percent = decimal.groups()
        return _signed(sign, Fraction(f"{integer}.{part}")) / (100 if percent else 1)
    if (rational := _RATIONAL.fullmatch(text)) is not None:
        return _rational(rational)
    if (repeating := _REPEATING.fullmatch(text)) is not None:
        return _repeating(repeating)
    if (percentage := _PERCENTAGE.fullmatch(text)) is not None:
        rational = _RATIONAL.fullmatch(percentage[1])
        number = None if rational is None else _rational(rational)
        if number is not None:
            return number / 100
    if (scientific := _SCIENTIFIC.fullmatch(text)) is not None:
        digits, exponent, other_digits, other_exponent = scientific.groups()
        power = int(exponent or other_exponent)
        if abs(power) > MAX_EXPONENT:
            return None
        return Fraction(digits or other_digits) * Fraction(10) ** power
    if (scaled := _SCALED.fullmatch(text)) is not None:
        return Fraction(scaled[1]) * _SCALES[scaled[3].lower()]
    if (over := _OVER.fullmatch(text)) is not None:
        return Fraction(int(over[1]), int(over[2])) if int(over[2]) else None
    if (ordinal := _ORDINAL.fullmatch(text)) is not None:
        return Fraction(int(ordinal[1]))
    return spoken_number(text) if reads_words else None


def _signed(sign: str, number: Fraction) -> Fraction:
    return -number if sign else number


def _repeating(match: re.Match[str]) -> Fraction:
    """Returns the number whose last digits repeat without end."""
    sign, integer, fixed, period, percent = match.groups()
    number = Fraction(f"{integer or 0}.{fixed or 0}")
    nines = 10 ** len(period) - 1
    number += Fraction(
        int(period),
        nines * 10 ** len(fixed),
    )
    if percent:
        number /= 100
    return _signed(sign, number)


def _rational(match: re.Match[str]) -> Fraction | None:
    groups = match.groups()
    sign, integer, above, below = groups[:4] if groups[2] is not None else groups[4:]
    if not Fraction(below):
        return None
    part = Fraction(above) / Fraction(below)
    if integer and part < 0:
        return None
    return _signed(sign, Fraction(integer or 0) + part)


def spoken_number(text: str) -> Fraction | None:
    """Returns the number that words write: "one hundred and five", "three quarters", or None."""
    words = re.sub(r"[-,]", " ", text.casefold()).split()
    if not words or len(words) > 20:
        return None
    sign = 1
    if words[0] in ("minus", "negative"):
        sign = -1
        words = words[1:]
    percent = 1
    if words[-1:] in (["percent"], ["%"]) or words[-2:] == ["per", "cent"]:
        percent = 100
        words = words[: -2 if words[-1] == "cent" else -1]
    number = _spoken_sum(words)
    return None if number is None else sign * number / percent


def _spoken_sum(words: list[str]) -> Fraction | None:
    """Returns the number of "two and a half", "a dozen" or "one point five", or None."""
    if "point" in words:
        at = words.index("point")
        integer = _whole(words[:at])
        digits = [_SMALL.get(word, 10) for word in words[at + 1 :]]
        if integer is None or not digits or max(digits) > 9:
            return None
        return Fraction(f"{integer}.{''.join(map(str, digits))}")
    if (part := _part(words)) is not None:
        return part
    if "and" in words:
        at = len(words) - 1 - words[::-1].index("and")
        integer = _whole(words[:at])
        part = _part(words[at + 1 :])
        if integer is not None and part is not None and part < 1:
            return integer + part
    integer = _whole(words)
    return None if integer is None else Fraction(integer)


def _part(words: list[str]) -> Fraction | None:
    """Returns the part that "a half", "three quarters" or "half" names, or None."""
    if not words or len(words) > 3:
        return None
    name = words[-1]
    below = _PARTS.get(name.removesuffix("s"))
    if below is None:
        return None
    count = words[:-1]
    if not count:
        # "Third" alone is a place, and "thirds" name no number.
        return Fraction(1, below) if name in ("half", "quarter") else None
    number = 1 if count in (["a"], ["an"]) else _whole(count)
    # "Twenty fifth" is a place, as "third" is.
    if number is None or number >= 20 or (number > 1) != name.endswith("s"):
        return None
    return Fraction(number, below)


def _whole(words: list[str]) -> int | None:
    """Returns the whole number that words of English write, or None."""
    if words[:1] in (["a"], ["an"]) and words[1:2] and words[1] in _SCALES:
        words = ["one", *words[1:]]
    if not words or words[-1] == "and" or words[0] in ("and", *_SCALES):
        return None
    total = 0
    group = 0
    last_small = 0
    scale_before = 10**15
    for at, word in enumerate(words):
        if word == "and":
            if words[at - 1] not in _SCALES:
                return None
            continue
        if word in _SMALL:
            small = _SMALL[word]
            # "One two" is no number; "twenty two" is.
            fits = last_small == 0 or (last_small >= 20 and last_small % 10 == 0 and 0 < small < 10)
            if not fits or (at and words[at - 1] == "zero"):
                return None
            group += small
            last_small = small
        elif word in ("hundred", "dozen"):
            if not 0 < group < 100:
                return None
            group *= _SCALES[word]
            last_small = 0
        elif word in _SCALES:
            scale = _SCALES[word]
            if not group or scale >= scale_before:
                return None
            total += group * scale
            scale_before = scale
            group = 0
            last_small = 0
        else:
            return None
    return total + group
