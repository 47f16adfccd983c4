"""Quantities: numbers with a unit, and amounts of money."""

import math
import re

from slipstream.environments.answers import currencies_in, plain
from slipstream.environments.math_judge.expressions import value_of
from slipstream.environments.math_judge.formulas import last_side
from slipstream.environments.math_judge.number_answers import Number
from slipstream.environments.math_judge.numerals import number_in
from slipstream.environments.math_judge.phrases import core, is_bound, without_aside
from slipstream.environments.math_judge.units import Unit, plain_unit, unit_at_start

_NEAR = 1e-6
# No quantity has a larger number.
MAX_AMOUNT = 10**100
# The same amount, perhaps rounded in another unit: 60 km/h (37 mph).
_ROUNDED = 0.01
_NUMBER = r"-?(?:\d+(?:\.\d+)?|\.\d+)"
# A number, also as a fraction, root, multiple of pi or power of ten, before a unit.
_VALUE = re.compile(
    rf"(?<![\w.^/])(?P<value>{_NUMBER}(?:\s*(?:\\times"
    rf"|\\cdot|[x*])\s*10\s*\^\s*\{{?-?\d+\}}?"
    rf"|[eE][-+]?\d+"
    rf"|\s*/\s*\d+| \d+/\d+"
    rf"|\s*\\[dt]?frac\{{\d+\}}\{{\d+\}}"
    rf"|\s*(?:\\pi|pi\b)(?:\s*/\s*\d+)?"
    rf"|\s*\\sqrt\{{?\d+\}}?)?"
    r"|-?\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}"
    r"|\\sqrt\s*\{[^{}]*\}"
    r"|\\pi(?:\s*/\s*\d+)?)"
    r"(?P<scale> (?:hundred"
    r"|thousand|million"
    r"|billion|dozen)\b)?(?P<rest>-?\s*)"
)
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12}
# Texts that leave a number before a unit a part of one.
_PARTIAL = re.compile(
    r"\d *+(?:[+*]"
    r"|\\(?:cdot|times)\b) *+\d(?!0? *\^)"
    r"|\\sqrt *\d|\d +\+ +\d"
)
# Codes that begin as a quantity does: 0b1011, 2b1a, 2024-W05, 2H+. "10m2" and "1h30m" are none.
_CODE = re.compile(
    r"0[bBoO]\d+|\d+[A-Za-z]*[+-]|\d+-?[A-Za-z]+\d{2,}\w*"
    r"|(?!\d+h\d+m)\d+[A-Za-z]+\d+[A-Za-z]\w*"
)
_DECIMAL_COMMA = re.compile(r"(?<![\d,])(\d+),(\d{1,2})(?=\s*[A-Za-z°%\\])")
_CLOCK = re.compile(r"(\d+):([0-5]\d)(?::([0-5]\d))?")
# Letters behind a number that may be no sign of a unit: "a" is a word, and M mol/L or million.
_LETTERS_WITHOUT_UNIT = ("a", "m")
_SKIPPED = re.compile(
    r"\s*(?:(?:full"
    r"|whole|more|extra"
    r"|additional|total)\s+)?(?:of (?:a"
    r"|an|the) )?"
)


class Amount:
    """A number with its unit, None for none, and the word of a unit that is unknown."""

    def __init__(self, number: float, unit: Unit | None, word: str = "") -> None:
        self.number = number
        self.unit = unit
        self.word = word.lower().rstrip(".")

    @property
    def size(self) -> float:
        return self.number * (1.0 if self.unit is None else self.unit.factor)


def amounts_in(text: str) -> list[Amount]:
    """Returns the numbers of a text with their units; "1 h 30 min" is one amount."""
    text = plain_unit(text)
    amounts: list[Amount] = []
    last_end = -1
    for match in _VALUE.finditer(text):
        number = number_in(match["value"], reads_words=False)
        number = value_of(match["value"]) if number is None else number
        if number is None or abs(number) > MAX_AMOUNT:
            continue
        scale = _SCALES[match["scale"].strip()] if match["scale"] else 1
        start = match.end()
        start += _SKIPPED.match(text, start).end() - start  # type: ignore[union-attr]
        unit, word, length = unit_at_start(text[start:])
        amount = Amount(float(number) * scale, unit, word)
        between = text[last_end : match.start()] if last_end >= 0 else "-"
        previous = amounts[-1] if amounts else None
        is_continued = (
            previous is not None
            and unit is not None
            and previous.unit is not None
            and previous.unit.dimensions == unit.dimensions
            and previous.unit.factor > unit.factor
            and re.fullmatch(r"[\s,]*(?:and|\+)?\s*", between) is not None
        )
        if is_continued and previous is not None and unit is not None:
            total = (previous.size + amount.size) / unit.factor
            amounts[-1] = Amount(total, unit)
        else:
            amounts.append(amount)
        last_end = start + length
    return amounts


class Quantity:
    """A number with a unit: 5 m, 60 km/h, 12 apples, 90 degrees."""

    def __init__(self, text: str, amount: Amount, question: str) -> None:
        self._text = text
        self._amount = amount
        value = number_in(repr(amount.number))
        self._number = None if value is None else Number(repr(amount.number), value, question)
        unit = amount.unit
        self._dimensions = None if unit is None else unit.dimensions

    @classmethod
    def read(cls, text: str, question: str) -> "Quantity | None":
        short = plain_unit(core(text))
        if re.search(r"[=<>,;]|\bor\b", short) or _PARTIAL.search(short) or _CODE.fullmatch(short):
            return None
        match = _VALUE.match(short)
        if match is None:
            return None
        amounts = amounts_in(short)
        if len(amounts) != 1:
            return None
        (amount,) = amounts
        if amount.unit is None and not re.fullmatch(r"[a-z]{3,}.*", amount.word):
            return None
        if amount.unit is None and not match["rest"]:
            return None
        # "3x" and "2ab" are expressions; "5 m" and "5m" are quantities.
        rest = short[match.end() :].strip()
        if amount.unit is None and not re.fullmatch(r"[a-z][a-z ]*(?:/ ?[a-z]+)?", rest):
            return None
        if "\\" in rest and "\\cdot" not in rest:
            return None
        return cls(text, amount, question)

    def agrees(self, phrase: str) -> bool | None:
        text = without_aside(phrase)
        if is_bound(core(text), self._text):
            return False
        text = _DECIMAL_COMMA.sub(r"\1.\2", text)
        text = re.sub(
            r"\((?:about|approximately"
            r"|≈|roughly|or)[^()]*\)",
            " ",
            text,
        )
        side = last_side(text)
        if _PARTIAL.search(core(side)) and "$" not in side:
            return False
        amounts = amounts_in(side) or amounts_in(text)
        if (clock := self._clock(core(text))) is not None:
            return self._same(clock)
        if not amounts:
            return None if self._number is None else self._number.agrees(phrase)
        with_unit = [amount for amount in amounts if amount.unit is not None]
        if self._dimensions is None:
            return self._agrees_with_word(amounts, text)
        same = [
            amount
            for amount in with_unit
            if amount.unit and amount.unit.dimensions == self._dimensions
        ]
        if same:
            last = same[-1]
            is_near = all(math.isclose(last.size, amount.size, rel_tol=_ROUNDED) for amount in same)
            if not is_near and not _is_prose(text):
                return False
            return any(map(self._same, same if is_near else same[-1:]))
        if self._dimensions == (("angle", 1),) and "\\pi" in text:
            return self._same(Amount(amounts[-1].number, Unit(1.0, self._dimensions)))
        last_word = amounts[-1].word
        is_sign = len(last_word) == 1 and last_word not in _LETTERS_WITHOUT_UNIT
        if with_unit or is_sign:
            return False
        return math.isclose(amounts[-1].number, self._amount.number, rel_tol=_NEAR)

    def _agrees_with_word(self, amounts: list[Amount], text: str) -> bool:
        """Whether the last number counts the same things as the answer, or things of no name."""
        last = amounts[-1]
        if not math.isclose(last.number, self._amount.number, rel_tol=_NEAR):
            return False
        if last.unit is not None:
            return False
        word = self._amount.word.removesuffix("s")
        is_other = last.word.endswith("s") and len(last.word) > 3 and last.word != "units"
        return not is_other or word in text.lower()

    def _clock(self, text: str) -> Amount | None:
        """Returns the amount of 2:30 where the answer has hours and minutes."""
        clock = _CLOCK.fullmatch(text)
        if clock is None or self._dimensions != (("time", 1),) or "hour" not in self._text:
            return None
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return Amount(3600.0 * hours + 60.0 * minutes + seconds, Unit(1.0, self._dimensions))

    def _same(self, amount: Amount) -> bool:
        return math.isclose(amount.size, self._amount.size, rel_tol=_NEAR)


def _is_prose(text: str) -> bool:
    return len(re.findall(r"[A-Za-z]{2,}", text)) > 4


class Money:
    """An amount of money, in dollars, cents or another currency."""

    def __init__(self, text: str, question: str, reply: str) -> None:
        value = number_in(re.sub(r"\s*(?:cents?|¢)$", "", plain(text)))
        if value is None:
            raise ValueError(f"{text!r} is no amount of money")
        self._currencies = currencies_in(text)
        self._reply_currencies = currencies_in(reply)
        self._value = value
        self._question = question

    @classmethod
    def read(cls, text: str, question: str, reply: str) -> "Money | None":
        if not currencies_in(text):
            return None
        try:
            return cls(text, question, reply)
        except ValueError:
            return None

    def agrees(self, phrase: str) -> bool | None:
        both = re.search(
            r"(\d+)(?: and"
            r"|,)? (\d{1,2})\s*(?:cents?\b|¢)",
            phrase,
        )
        if both is not None and "dollar" in self._currencies:
            return 100 * int(both[1]) + int(both[2]) == 100 * self._value
        text = re.sub(r"(?<=\d)\s*(?:cents?\b|¢)", "", phrase)
        says_cents = text != phrase
        has_cents = "cent" in self._currencies
        value = self._value
        reply_currencies = self._reply_currencies
        if says_cents and not has_cents:
            if "dollar" not in self._currencies:
                return False
            value = value * 100
        elif has_cents and not says_cents and "dollar" in reply_currencies:
            value = value / 100
        elif reply_currencies and self._currencies.isdisjoint(reply_currencies):
            return False
        return Number(f"{value}", value, self._question).agrees(text)
