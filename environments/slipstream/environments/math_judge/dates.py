"""Dates, times of the day and ratios: numbers with words, dashes or colons between them."""

import math
import re
from typing import NamedTuple

from slipstream.environments.answers import bare
from slipstream.environments.math_judge.formulas import plain_words
from slipstream.environments.math_judge.phrases import core, is_bound, without_aside

_MONTHS = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
]
_MONTH = "|".join(rf"{name[:3]}(?:{name[3:]})?" if name != "may" else "may" for name in _MONTHS)
_MONTH = _MONTH.replace("sep(?:tember)?", "sept?(?:ember)?")
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(\d{4})"
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(rf"\b{_YEAR}[-/.](\d{{1,2}})[-/.](\d{{1,2}})(?!\d)"), "ymd"),
    (re.compile(rf"\b({_MONTH})\.? {_DAY}(?:,? {_YEAR})?\b(?!\d)", re.IGNORECASE), "Mdy"),
    (re.compile(rf"\b{_DAY}(?: of)? ({_MONTH})\.?(?:,? {_YEAR})?\b", re.IGNORECASE), "dMy"),
    (re.compile(rf"\b({_MONTH})\.?,? {_YEAR}\b", re.IGNORECASE), "My"),
    (re.compile(rf"(?<!\d)(\d{{1,2}})[/.](\d{{1,2}})[/.]{_YEAR}(?!\d)"), "??y"),
)
_CLOCK = re.compile(
    r"(?<![\d:.])(\d{1,2})(?::([0-5]\d))?(?::([0-5]\d))?\s*(?:(a"
    r"|p)\.?\s?m\b\.?"
    r"|(o'clock))?(?![\d:])",
    re.IGNORECASE,
)
_NAMED_TIMES = {"noon": (12, 0), "midday": (12, 0), "midnight": (0, 0)}
_ASKS_TIME = re.compile(
    r"\btime\b|\bo'clock\b"
    r"|\bwhen\b|\bclock\b",
    re.IGNORECASE,
)
_LOWEST = re.compile(
    r"\b(?:lowest|simplest"
    r"|simplified|reduced"
    r"|simplify|reduce)\b",
    re.IGNORECASE,
)
_RATIO = re.compile(
    r"(?<![\d.:])\d+(?:\.\d+)?(?: *(?::"
    r"|\bto\b|\\colon\b"
    r"|\\ratio\b|/) *\d+(?:\.\d+)?)+(?![\d.:]*\d)"
)


class Day(NamedTuple):
    """A day or month; None for what a text leaves out."""

    year: int | None
    month: int
    day: int | None


def day_in(text: str) -> Day | None:
    """Returns the one day that a text names, None without one or with several."""
    days = set()
    rest = text
    for form, order in _FORMS:
        for match in form.finditer(rest):
            day = _day(match, order)
            if day is not None:
                days.add(day)
        rest = form.sub(" ; ", rest)
    return days.pop() if len(days) == 1 else None


def _day(match: re.Match[str], order: str) -> Day | None:
    parts = dict(zip(order.replace("?", ""), match.groups(), strict=False))
    if order == "??y":
        first = int(match[1])
        second = int(match[2])
        # Of two small numbers either may be the month.
        smaller = min(first, second)
        larger = max(first, second)
        if larger <= 12 and smaller != larger:
            return None
        if larger > 31:
            return None
        return Day(
            year=int(match[3]),
            month=smaller,
            day=larger,
        )
    if "M" in parts:
        name = parts["M"].lower()
        beginnings = [month_name[:3] for month_name in _MONTHS]
        month = 1 + beginnings.index(name[:3])
    else:
        month = int(parts["m"])
    year = int(parts["y"]) if parts.get("y") else None
    day = int(parts["d"]) if parts.get("d") else None
    if not 1 <= month <= 12 or not (day is None or 1 <= day <= 31):
        return None
    return Day(year, month, day)


class Date:
    """A day of the year or a month of a year, in words or as 2000-01-31."""

    def __init__(self, day: Day) -> None:
        self._day = day

    @classmethod
    def read(cls, text: str) -> "Date | None":
        short = re.sub(
            r"^(?:mon|tues"
            r"|wednes|thurs"
            r"|fri|satur|sun)day,? ",
            "",
            _short(text),
            flags=re.IGNORECASE,
        )
        day = day_in(short)
        is_all = any(form.fullmatch(short) for form, _ in _FORMS)
        return cls(day) if day is not None and is_all else None

    def agrees(self, phrase: str) -> bool | None:
        text = _short(without_aside(phrase))
        if is_bound(text, ""):
            return False
        day = day_in(text)
        if day is None:
            return False if re.search(r"\d", text) else None
        pairs = zip(self._day, day, strict=True)
        return all(part is None or part == other for part, other in pairs)


class _Time(NamedTuple):
    """Minutes of the day, and whether the half of the day is known."""

    minutes: int
    is_sure: bool


class Time:
    """A time of the day. Without a.m. or p.m. it may be of either half of the day."""

    def __init__(self, time: _Time) -> None:
        self._time = time

    @classmethod
    def read(cls, text: str, question: str) -> "Time | None":
        short = _short(text)
        time = _time(short)
        match = _CLOCK.fullmatch(short)
        if time is None or (match is None and short.casefold() not in _NAMED_TIMES):
            return None
        is_marked = match is None or match[4] or match[5] or ":0" in short
        return cls(time) if is_marked or (":" in short and _ASKS_TIME.search(question)) else None

    def agrees(self, phrase: str) -> bool | None:
        text = _short(without_aside(phrase))
        if is_bound(text, ""):
            return False
        time = _time(text)
        if time is None:
            return False if re.search(r"\d", text) else None
        day = 24 * 60 if time.is_sure and self._time.is_sure else 12 * 60
        return (time.minutes - self._time.minutes) % day == 0


def _time(text: str) -> _Time | None:
    """Returns the one time of the day in a text, or None."""
    times = set()
    for match in _CLOCK.finditer(text):
        hours, minutes, _, half, clock = match.groups()
        if minutes is None and half is None and clock is None:
            continue
        hour = int(hours)
        if hour > 24 or (half and hour > 12):
            return None
        if half:
            hour = hour % 12 + (12 if half.lower() == "p" else 0)
        is_sure = bool(half) or hour > 12 or hour == 0
        minute = int(minutes or 0)
        times.add(_Time(60 * (hour % 24) + minute, is_sure))
    for name, (hour, minute) in _NAMED_TIMES.items():
        if re.search(rf"\b{name}\b", text, re.IGNORECASE):
            times.discard(_Time(60 * 12 + minute, is_sure=False))
            times.add(_Time(60 * hour + minute, is_sure=True))
    return times.pop() if len(times) == 1 else None


class Ratio:
    """Numbers with colons. A multiple is the same, unless lowest terms are asked for."""

    def __init__(self, terms: list[float], question: str, time: _Time | None) -> None:
        self._terms = terms
        self._is_lowest = _LOWEST.search(question) is not None
        self._time = time

    @classmethod
    def read(cls, text: str, question: str) -> "Ratio | None":
        short = _short(text)
        match = _RATIO.fullmatch(short)
        if match is None or ":" not in short:
            return None
        return cls(_terms(match[0]), question, _time(short))

    def agrees(self, phrase: str) -> bool | None:
        text = _short(without_aside(phrase))
        if is_bound(text, ""):
            return False
        # 10:30 may be a time, if the reply takes it for one.
        if self._time is not None and re.search(r"\d\s*[ap]\.?m\b", text, re.IGNORECASE):
            return Time(self._time).agrees(phrase)
        matches = _RATIO.findall(re.sub(r"\bfrom\b.*?\bto\b", "", text))
        if not matches:
            return False if re.search(r"\d", text) else None
        if len(matches) != 1:
            return False
        terms = _terms(matches[0])
        if self._is_lowest or len(terms) != len(self._terms):
            return terms == self._terms
        pairs = zip(terms, self._terms, strict=True)
        first = terms[0]
        right_first = self._terms[0]
        return all(math.isclose(term * right_first, right * first) for term, right in pairs)


def _terms(ratio: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", ratio)]


def _short(text: str) -> str:
    """Returns a text without marks around it, in single spaces."""
    text = re.sub(r"\\colon\b|\\ratio\b", ":", text)
    return bare(plain_words(core(text)))
