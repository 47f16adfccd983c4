"""Numbers: right answers that have a value and no unit."""

import re
from fractions import Fraction

from slipstream.environments.answers import bare
from slipstream.environments.math_judge.expressions import value_of
from slipstream.environments.math_judge.formulas import (
    has_words,
    last_formula,
    last_side,
    plain_words,
)
from slipstream.environments.math_judge.numerals import number_in, same_number, spoken_number
from slipstream.environments.math_judge.phrases import core, endings, is_bound, without_aside

_ASKS_PERCENT = re.compile(r"per ?cent|%", re.IGNORECASE)
# Seven factorial, alone or in a formula; "The answer is 7!" is an exclamation.
_FACTORIAL = re.compile(r"^[^A-Za-z]*[\d)}]!+[^A-Za-z]*$")
_SCALE_WORDS = r"hundred|thousand|million|billion|trillion|dozen"
# The last number of a sentence, and what belongs to it.
_LAST_NUMBER = re.compile(
    r"(?<![\w.^_/])(-?(?:\d+(?:\.\d+"
    r"|,\d{1,2}(?![\d,]))?|\.\d+)"
    r"(?:\s*/\s*\d+(?![\d.]))?(?:\s*(?:\\?%"
    r"|per ?cent\b))?"
    rf"(?: (?:{_SCALE_WORDS})s?\b)?(?: (?:over"
    rf"|out of) \d+)?)(?![\w^!/(]"
    rf"|\.\d|\\[a-z])"
)
_SIGN = re.compile(
    r"^[^\w(]*(?:[A-Za-z] *)?([<>]"
    r"|\\[lg]eq?\b"
    r"|\\ne\b|≠)"
)
_BASE = re.compile(r"\d_\{?\w")


class Number:
    """A number, also as a fraction, a percentage, a power of ten, or in words."""

    def __init__(self, text: str, value: Fraction, question: str = "") -> None:
        self._text = text
        self._value = value
        self._is_percentage = "%" in text or "percent" in text.lower()
        self._asks_percent = _ASKS_PERCENT.search(question) is not None

    @classmethod
    def read(cls, text: str, question: str) -> "Number | None":
        is_factorial = re.search(r"[\d)}]\s*!", text) is not None
        value = None if is_factorial else number_in(text, reads_decimal_comma=False)
        return None if value is None else cls(text, value, question)

    def agrees(self, phrase: str) -> bool | None:
        text = core(phrase)
        if _SIGN.match(text) and not _SIGN.match(self._text):
            return False
        if is_bound(text, self._text):
            return False
        if _FACTORIAL.match(phrase):
            return self._equals(value_of(phrase.strip("$ ")), phrase)
        for ending in endings(text):
            value = number_in(ending)
            if value is not None:
                return self._equals(value, ending)
        return self._agrees_with_formula(phrase)

    def _agrees_with_formula(self, phrase: str) -> bool | None:
        side = bare(last_side(last_formula(phrase)))
        if _BASE.search(side):
            return False
        words = plain_words(without_aside(phrase))
        is_number = number_in(side, reads_words=False) is not None
        is_plain = re.fullmatch(r"-?[\d.,/ ]*%?", side) is not None
        if has_words(words) and is_plain:
            numbers = [match[1] for match in _LAST_NUMBER.finditer(words)]
            if numbers:
                return self._equals(number_in(numbers[-1]), numbers[-1])
        if is_number:
            return self._equals(number_in(side, reads_words=False), side)
        if re.search(r"\d", side):
            return self._equals(value_of(side), side)
        if re.search(r"\d", words):
            return False
        if side and (value := value_of(side)) is not None:
            return self._equals(value, side)
        return self._agrees_with_words(words)

    def _agrees_with_words(self, words: str) -> bool | None:
        """Looks for a number in words within a sentence."""
        tokens = re.sub(r"[.,;:!?]", " ", words).split()
        end = len(tokens)
        while end:
            for start in range(max(0, end - 8), end):
                run = tokens[start:end]
                value = spoken_number(" ".join(run))
                # "One of them" is no number.
                if value is not None and run not in (["one"], ["One"], ["half"]):
                    return self._equals(value, "")
            end -= 1
        return None

    def _equals(self, value: Fraction | None, text: str) -> bool:
        if value is None:
            return False
        if same_number(value, self._value):
            return True
        has_percent = "%" in text or "cent" in text.lower()
        if self._is_percentage and not has_percent:
            return same_number(value, 100 * self._value)
        if self._asks_percent and has_percent and not self._is_percentage:
            return same_number(100 * value, self._value)
        return False
