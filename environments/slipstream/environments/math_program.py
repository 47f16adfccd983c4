"""Compares answers with math-verify; each line of stdin, a JSON object, gets a line on stdout.

For example, {"answer": "1/2", "reply": "It is 0.5."} gets
{"known": true, "readable": true, "right": true}.
"""

import json
import logging
import math
import os
import re
import resource
import sys
from typing import TypeAlias

from slipstream.core.machine.process import die_with_parent
from slipstream.environments.answers import bare, final_of, numbers, other_money, plain

# Memory limit of this process, enough for sympy: 9^9^9 must end this process and no other.
MAX_MEMORY_BYTES = 4 << 30
# Memory that a reply may leave behind; with more, the next reply gets another process.
MAX_LEFT_KIB = 1 << 20
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)")
_MIXED = re.compile(r"(?<![\d/.])(\d+) +(\d+)/(\d+)(?![\d/])")
_TEXT_WORD = re.compile(r"\s*\\text\{\s*(and|or)\s*\}\s*")
_WORD = re.compile(r"(?<![\\\w])[A-Za-z]{2}|.\$.")
_SEVERAL = re.compile(r"or|,")
_EITHER = re.compile(r"\d\S{0,40}(?: \S{1,20})? or \S{0,40}\d")
# A number that is no part of one, and the end of a unit that is no power or part of a ratio.
_MEASURE = r"(-?(?<![\w.^/])\d++(?:\.\d++)?)"
_UNIT_END = r"(?![\w^²³/]|\s*\}?\s*(?:\^|/|per\b))"
_UNIT = re.compile(rf"{_MEASURE}\s*+(?:\\\w+\{{)?\s*([A-Za-z]+){_UNIT_END}")
_RATE = re.compile(
    r"(-?\d+(?:[./]\d+)?(?:\s*\\(?:times|cdot)\s*10\^\{?-?\d+\}?)?)"
    r"(?:\s*[A-Za-z]+(?:/| per )[A-Za-z]+(?:\^\{?\d\}?)?| [A-Za-z]{3,})"
)
_PER = re.compile(
    rf"{_MEASURE} *+(?:\\\w+\{{ *+)?([A-Za-z]++) *+(?:/|per ) *([A-Za-z]+){_UNIT_END}"
)
_MPH = re.compile(r"(?<!\s) *+(?<![A-Za-z])(mph|kmh|kph)\b", re.IGNORECASE)
# What leaves a number before a unit a part of one.
_FORMULA = re.compile(r"\d *+(?:[+*]|\\(?:cdot|times)\b) *+\d|\\sqrt")
# A letter of a formula, where a unit would stand behind a space.
_LETTER = re.compile(r"\d[A-Z]\b")
_MEASURED = re.compile(r"\d\s*(?:\\\w+\{)?\s*[A-Za-z]")
# What a reply says that the answer is not.
_REJECTED = re.compile(
    r"(?<!\s),?\s*+不是[^.]*$|"
    r"(?<!\s),?\s*+\bnot\b[^.]*?\bbut\b"
    r"|(?<!\s),?\s++\(?(?:(?:and |but )?(?:not|rather than|instead of)|because|since)\b.*$",
    re.DOTALL,
)
# Words before a number that make it a bound, a guess or no answer.
_BOUND = re.compile(
    r"\b(?:not|at least|at most|(?:less|more|fewer|greater) than|between|maybe|perhaps|never"
    r"|cannot|(?:could|might) be|(?:min|max)imum of|anything but|nicht|no es|pas|não|не)\b|不[是为]"
    r"|n't (?=[-\d])|\b(?:over|under|up to|nearly|almost) -?[\d.,%]+\Z|\d\+\s*\Z"
    r"|\d or (?:more|less|fewer|so)\b",
    re.IGNORECASE,
)
_SCALE = re.compile(
    r"(?<!\d)(\d++(?:\.\d++)?) ++(hundred|thousand|million|billion|dozen)s?\b", re.IGNORECASE
)
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12}
# A number in words, without other words: twelve, minus twenty-five percent, three quarters, a half.
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_TO_99 = (*_ONES, *(f"{ten}-{one}".strip("-") for ten in _TENS for one in ("", *_ONES[1:10])))
_NUMERALS = {word: number for number, word in enumerate(_TO_99)}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6}
_PARTS |= {"seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10}
_NUMERAL = "|".join(_TO_99).replace("-", "[- ]")
_SPOKEN = re.compile(
    rf"(minus |negative )?({_NUMERAL}|an?(?=[- ]))?(?:(?(2)[- ])"
    rf"({'|'.join([*_PARTS, *_SCALES])})(s?))?( per ?cent|%)?",
    re.IGNORECASE,
)
# Words before an answer: I would say, it should be, that makes.
_LEAD = re.compile(
    r"\s*(?:(?:i|we)(?:'d|'ll| would)? (?:say|think|get|got)(?: that)?"
    r"|(?:it|that|this) (?:is|should be|must be|would be|makes)|(?:so|thus|hence),)"
    r"(?: (?:it is|it's))?:? +",
    re.IGNORECASE,
)
# What stands before a word that is told: the parity is even, the chance is one half.
_TOLD = re.compile(
    r"(?:(?!\b(?:not|no|never|nobody|if|whether|or)\b|n't)[^.!?\n])* (?:is|are|equals) ",
    re.IGNORECASE,
)
# A time of the day, what asks for one, a ratio, and what asks for it in its lowest terms.
_TIME = re.compile(r"(?<![\d:])(\d{1,2}):(\d\d)(?![\d:])(?:\s*([ap])\.?m\b)?", re.IGNORECASE)
_ASKS_TIME = re.compile(r"\btime\b|\bo'clock\b|\bwhen\b", re.IGNORECASE)
_RATIO = re.compile(r"(?<![\d.:])\d+(?:\.\d+)?(?: *(?::|\bto\b) *\d+(?:\.\d+)?)+(?![\d.:]*\d)")
_LOWEST = re.compile(r"\b(?:lowest|simplest|simplified|reduced|simplify|reduce)\b", re.IGNORECASE)
# Ways to write what mathematics writes otherwise.
_WRITTEN: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(\d+) (?:over|out of) (\d+)\b"), r"\1/\2"),
    (re.compile(r"(?<=[\w)])\*\*(?=[\w(])"), "^"),
    (
        re.compile(r"(?:the set of )?all (?:the )?real(?:s| numbers)(?=[\s.!$]*\Z)", re.IGNORECASE),
        r"(-\\infty, \\infty)",
    ),
    (re.compile(r"(?<![\\A-Za-z])(a?r?c?(?:sin|cos|tan)|ln|log|exp)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"(?<=[)\]]) *(?:U|∪) *(?=[(\[])"), r" \\cup "),
    (re.compile(r"\\varnothing|∅"), r"\\emptyset"),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<![\\A-Za-z])sqrt(\d+(?:\.\d+)?)"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt *\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\mathrm *\{ *([ei]) *\}"), r"\1"),
    (re.compile(r"(?<![\\A-Za-z])([a-z]) *(?:in\b|∈) *(?=\\?[\[({])"), r"\1 \\in "),
    (re.compile(r"(?<![\\A-Za-z])[a-z] *\\in *(?=\\?\{)"), ""),
)
_DEGREES = re.compile(r"((?<!\d)\d++(?:\.\d++)?) *+(?:°|\^\{?\\circ\}?|degrees?\b)")
# An interval as bounds of a letter, and the signs of its ends.
_LESS, _MORE = r"(<|\\leq?\b)", r"(>|\\geq?\b)"
_BETWEEN = re.compile(rf"([^<>=]+?) *{_LESS} *[a-z] *{_LESS} *([^<>=]+)")
_DOWN = re.compile(rf"([^<>=]+?) *{_MORE} *[a-z] *{_MORE} *([^<>=]+)")
_SIGN = r"(?P<sign><|>|\\[lg]eq?\b)"
_ONE_SIDED = re.compile(rf"[a-z] *{_SIGN} *(?P<bound>[^<>=]+)")
_MIRRORED = re.compile(rf"(?P<bound>[^<>=]+?) *{_SIGN} *[a-z]")
_MEMBER = re.compile(r"[a-z] *\\in *(?=[\[(]|\\left)")
# What a question that asks for an interval says; otherwise (2, 5) is a point.
_ASKS_INTERVAL = re.compile(
    r"interval|inequalit|domain|\brange|solution set|[<>≤≥]|\\[lg]eq?\b"
    r"|\ball (?:real |possible )?(?:values|x\b|numbers)",
    re.IGNORECASE,
)
# What goes on in an answer without being written.
_GOES_ON = re.compile(r"\\[lcd]?dots\b|\\dots[cbmio]\b|…|\.\.\.")
# Parts of their size by which two numbers are no longer the same, however small they are.
_APART = 1e-3
# How several values stand together, and which forms of a reply may say those of an answer.
_SHAPES = (
    ("interval", re.compile(r".*(?:[<>]|\\[lg]eq?\b|\\infty\b.*[,)]|\\cup\b|\\in\b).*")),
    ("interval", re.compile(r"\(([^(),]+),[^(),]+\]|\[[^\[\],]+,[^(),]+\)")),
    ("set", re.compile(r"\\?\{.*,.*\}|.* or .*|([a-z]) *=[^=,]*(?:,| and\b) *\1 *=.*")),
    ("point", re.compile(r"\(\w+(?:, *\w+)+\) *=.*|[A-Za-z] *=[^=,]*(?:,| and\b) *[A-Za-z] *=.*")),
    ("pair", re.compile(r"\([^()]*,[^()]*\)")),
    ("closed", re.compile(r"\[[^\[\]]*,[^\[\]]*\]")),
    ("several", re.compile(r"[^()\[\]{}=]*(?:,| and )[^()\[\]{}=]*")),
)
_MAY_SAY = {
    "interval": ("interval", "pair", "closed"),
    "closed": ("closed", "interval"),
    "set": ("set", "several"),
    "point": ("point", "pair", "several"),
    "pair": ("pair", "point", "several"),
    "several": ("several", "set", "pair", "point"),
}
_NAMES = re.compile(r"\((?:\w+, *)+\w+\) *= *|[A-Za-z] *= *")
_COMPARED = re.compile(r"\$? *([<>]=?|\\[lg]eq?\b)")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "m": 1e-3, "μ": 1e-6, "n": 1e-9}
# The units of each quantity, in numbers of the first one.
_QUANTITIES: tuple[dict[str, float], ...] = (
    {"m": 1, "meter": 1, "metre": 1, "cm": 0.01, "mm": 0.001, "km": 1000}
    | {"inch": 0.0254, "inche": 0.0254, "foot": 0.3048, "feet": 0.3048, "ft": 0.3048}
    | {"yard": 0.9144, "mile": 1609.344, "mi": 1609.344}
    | {"kilometer": 1000, "kilometre": 1000, "centimeter": 0.01, "centimetre": 0.01},
    {"g": 1, "gram": 1, "kg": 1000, "kilogram": 1000, "mg": 0.001, "ton": 1e6, "tonne": 1e6}
    | {"lb": 453.59237, "pound": 453.59237, "oz": 28.349523125, "ounce": 28.349523125},
    {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "ms": 0.001}
    | {"h": 3600.0, "hr": 3600.0, "hour": 3600.0, "day": 86400.0, "week": 604800.0},
    {"month": 1, "year": 12},
    {"l": 1, "liter": 1, "litre": 1, "ml": 0.001, "gallon": 3.785411784},
    {"acre": 0.40468564224, "hectare": 1, "ha": 1},
    *(
        {f"{prefix}{unit}": factor for prefix, factor in _PREFIXES.items()} | {name: 1}
        for unit, name in (
            *(("N", "newton"), ("J", "joule"), ("W", "watt"), ("V", "volt"), ("A", "ampere")),
            *(("K", "kelvin"), ("Hz", "hertz"), ("Pa", "pascal"), ("mol", "mole"), ("B", "byte")),
        )
    ),
)
# Quantities, and the number in their first units.
_Amount: TypeAlias = tuple[tuple[int, ...], float]
_CHOICE = re.compile(
    r"(?:(?:(?:i|we)(?:'d|'ll| would| will| am sure| think)*\s)?"
    r"(?:choose|chose|pick|select|go with|option|choice|it's|it is)\s|\\text\w*\{)?\(?((?-i:[A-Z]))"
    # Several letters are no choice.
    r"(?!(?-i:\W|and|or|no|wait|actually|[A-Z](?!\w))*[A-Z]\W*$)"
    r"(?:[).:](?=[\s\\}]|$)|(?= because| since| is (?:correct|right)|,| - (?![A-Z]\b)"
    r"|[\u3040-\u30ff\uac00-\ud7af]|$))",
    re.IGNORECASE,
)


def main() -> None:
    """Answers each line of stdin with a line on stdout, until stdin ends."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    # math-verify warns of the missing time limit at the first call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Output of the packages goes to stderr, so that it does not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # The largest size of a process counts from before it became this program.
    at_start = _most_memory_kib()
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(compare(**request)) + "\n")
        if _most_memory_kib() > at_start + MAX_LEFT_KIB:
            return


def _most_memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def compare(answer: str, reply: str, question: str = "") -> dict[str, bool]:
    """Returns `known`, `readable` and `right` of a reply to a question, "" if nobody knows it.

    `known` says that `answer` is mathematics, `readable` that `reply` contains mathematics, and
    `right` that they agree. Blocks without a time limit.
    """
    from math_verify import parse, verify

    # The caller limits the time; math-verify's own limit would need threads.
    no_limit = {"parsing_timeout": None}
    if other_money(reply, answer):
        return {"known": True, "readable": True, "right": False}
    answer, reply = plain(answer), plain(reply)
    answer, said = (_TEXT_WORD.sub(r" \1 ", text) for text in (answer, final_of(reply)))
    kept = _REJECTED.sub("", said)
    # Where nothing is left, "not" stays and makes it no answer.
    said = kept if numbers(kept) or not numbers(said) else said
    *_, rest = reply.rpartition("\\boxed{")
    if not said and rest != reply and rest.count("{") >= rest.count("}"):
        # The last box never ends.
        return {"known": True, "readable": False, "right": False}
    told = _TOLD.sub("", _LEAD.sub("", said, count=1), count=1)
    same = [each for each in (said, kept, told) if _text(each, answer) == _text(answer, answer)]
    # 5 mV are not 5 MV, which are one text in small letters.
    if said and same and _amount(answer) in (None, _amount(same[0])):
        return {"known": True, "readable": True, "right": True}
    if _GOES_ON.search(answer):
        # math-verify would read the formulas in it alone.
        one, other = (re.sub(r"[\s{}$]", "", _GOES_ON.sub("…", each)) for each in (answer, said))
        return {"known": True, "readable": bool(said), "right": one == other}
    if (is_same := _same_colons(answer, said or reply, question)) is not None:
        return {"known": True, "readable": True, "right": is_same}
    if (word := _rewritten(told)) == told:
        word = _rewritten(_LEAD.sub("", said, count=1))
    said, answer = word, _rewritten(answer)
    if "\\pi" in answer:
        said = _DEGREES.sub(r"\1 \\pi / 180", said)
    if (shape := _shape(answer)) and (other := _shape(said)):
        if shape == "pair" and _ASKS_INTERVAL.search(question):
            shape = "interval"
        if other not in _MAY_SAY[shape]:
            return {"known": True, "readable": True, "right": False}
        if "interval" in (shape, other):
            answer, said = _interval(answer), _interval(said)
        elif other not in (shape, "set") and shape != "set":
            # The place of a number says which coordinate it is.
            answer, said = (
                f"({_NAMES.sub('', bare(each)).strip('()')})" for each in (answer, said)
            )
    is_bound = _sign(said) != _sign(answer) or (_BOUND.search(said) and not _BOUND.search(answer))
    if is_bound or (_EITHER.search(said) and not _SEVERAL.search(answer)):
        return {"known": True, "readable": False, "right": False}
    answer, said = _SCALE.sub(_scaled, answer), _SCALE.sub(_scaled, said)
    if (amount := None if _LETTER.search(answer) else _amount(answer)) is not None:
        if _MEASURED.search(said):
            return {"known": True, "readable": True, "right": _amount(said) == amount}
        if len(units := _UNIT.findall(answer)) == 1 and "°" not in said:
            answer = units[0][0]
    if (rate := _RATE.fullmatch(bare(answer))) and not re.search("[A-Za-z]", said):
        answer = rate[1]
    answer, said = _SCIENTIFIC.sub(_power, answer), _SCIENTIFIC.sub(_power, said)
    answer, said = _MIXED.sub(r"(\1+\2/\3)", answer), _MIXED.sub(r"(\1+\2/\3)", said)
    # The right answer is parsed as one formula: in the plain text "x^2 + 1" only the 1 is found.
    is_marked = "$" in answer or "\\boxed" in answer
    gold = [] if is_marked or not answer else parse(f"${answer}$", **no_limit)
    gold = gold or parse(answer, **no_limit)
    said = re.sub(r",? and ", ", ", said)
    readings = [parse(f"${said.strip('$')}$", **no_limit)] if said else []
    is_readable = any(map(bool, readings))
    if not said or _WORD.search(said):
        # A formula of words is no formula.
        readings.append(parse(said or reply, **no_limit))
        is_readable = bool(readings[-1])
    # A percentage may be written as its number.
    is_share = "%" in answer + said
    right = False
    for found in readings:
        if gold and found and verify(gold, found, timeout_seconds=None):
            # math-verify rounds to 6 places.
            numeric = [each for each in (gold[0], found[0]) if getattr(each, "is_number", False)]
            pair = [] if is_share else [each.evalf(15) for each in numeric]
            most = max(map(abs, pair), default=0)
            # Nothing is near to infinity.
            right |= len({*pair}) < 2 or bool(abs(pair[0] - pair[1]) <= _APART * most)
    return {"known": bool(gold), "readable": is_readable, "right": right}


def _same_colons(answer: str, said: str, question: str) -> bool | None:
    """Whether two times of a day or two ratios are the same; None if they are not such ones.

    A time without a.m. or p.m. may be of either half of the day. A ratio may be a multiple, unless
    the question asks for its lowest terms.
    """
    times = [{*_TIME.findall(text.casefold())} for text in (answer, said)]
    is_time = ":0" in answer or any(half for each in times for *_, half in each)
    is_time = is_time or _ASKS_TIME.search(question) is not None
    if is_time and len(times[0]) == 1 and _TIME.fullmatch(bare(answer)):
        if len(times[1]) != 1:
            return False
        read = []
        for ((hour, minute, half),) in times:
            in_day = int(hour) % 12 + 12 * (half == "p") if half else int(hour)
            read.append((in_day, minute, bool(half) or in_day > 12))
        (one, first, is_one_sure), (other, second, is_other_sure) = read
        half_day = 24 if is_one_sure and is_other_sure else 12
        return first == second and (one - other) % half_day == 0
    ratio, found = _RATIO.fullmatch(bare(answer)), _RATIO.findall(said)
    if ratio is None or ":" not in answer or len(found) != 1:
        return None
    terms, others = ([float(each) for each in numbers(text)] for text in (ratio[0], found[0]))
    if _LOWEST.search(question) or len(terms) != len(others):
        return terms == others
    pairs = zip(terms, others, strict=True)
    return all(math.isclose(one * others[0], other * terms[0]) for one, other in pairs)


def _text(text: str, answer: str) -> str:
    """Returns what is compared as text, in small letters; of a choice such as "B) 42" "B"."""
    text = bare(text)
    if len(bare(answer)) == 1:
        chosen = _CHOICE.match(text)
        return text if chosen is None else chosen[1]
    # The 20th of a month is the 20.
    return re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", text.casefold())


def _rewritten(text: str) -> str:
    """Returns a text with numbers in words, and what people write otherwise, as mathematics."""
    for pattern, written in _WRITTEN:
        text = pattern.sub(written, text)
    if (found := _SPOKEN.fullmatch(bare(text))) is None:
        return text
    sign, first, part, plural, percent = (each and each.lower() for each in found.groups())
    number = _NUMERALS.get((first or "").replace(" ", "-"), 1)
    if first and part in _PARTS:
        # "Twenty-fifth" is a place, as "third" and "hundreds" are.
        is_number = number < 20 and bool(plural) == (number > 1)
    else:
        is_number = bool(first) or (not plural and part in ("half", "quarter", *_SCALES))
    if not is_number:
        return text
    whole = f"{number * _SCALES.get(part or '', 1)}"
    over = f"/{_PARTS[part]}" if part in _PARTS else ""
    return f"{'-' if sign else ''}{whole}{over}{'%' if percent else ''}"


def _sign(text: str) -> str:
    """Returns the sign that a bound such as "> 18" begins with, or ""."""
    found = _COMPARED.match(text)
    return "" if found is None else found[1][:2].replace("\\l", "<=").replace("\\g", ">=")


def _shape(text: str) -> str:
    """Returns how several values stand together in a text, or "" if there is one value."""
    text = re.sub(r"\\(?:left|right)\b", "", bare(text))
    return next((name for name, form in _SHAPES if form.fullmatch(text)), "")


def _interval(text: str) -> str:
    """Returns the intervals that bounds of a letter write, else the text."""
    parts = [part.strip("$ ") for part in _MEMBER.sub("", bare(text)).split(" or ")]
    read = [*map(_one_interval, parts)]
    # A reply that names two intervals means one of them.
    return r" \cup ".join(read) if len(parts) == 1 or not {*parts} & {*read} else text


def _one_interval(text: str) -> str:
    if (both := _BETWEEN.fullmatch(text)) is not None:
        low, first, second, high = both.groups()
        return f"{'(' if first == '<' else '['}{low}, {high}{')' if second == '<' else ']'}"
    if (both := _DOWN.fullmatch(text)) is not None:
        high, first, second, low = both.groups()
        return f"{'(' if second == '>' else '['}{low}, {high}{')' if first == '>' else ']'}"
    if (one := _ONE_SIDED.fullmatch(text) or _MIRRORED.fullmatch(text)) is None:
        return text
    sign, bound = one["sign"], one["bound"]
    is_above = sign == ">" or sign.startswith("\\g")
    if is_above != (one.re is _MIRRORED):
        return rf"{'(' if sign in '<>' else '['}{bound}, \infty)"
    return rf"(-\infty, {bound}{')' if sign in '<>' else ']'}"


def _amount(text: str) -> _Amount | None:
    """Returns quantities and amount of "90 minutes", "1 h 30 min" or "60 km/h", or None."""
    if _FORMULA.search(text.rpartition("=")[2]):
        return None
    text_of_rates = _MPH.sub(
        lambda found: " mile/hour" if found[1].lower() == "mph" else " km/hour", text
    )
    rates: list[_Amount] = []
    for number, *units in _PER.findall(text_of_rates):
        first, second = map(_unit, units)
        if first is None or second is None:
            return None
        rate = float(f"{float(number) * first[1] / second[1]:.9g}")
        rates.append(((first[0], second[0]), rate))
        # The same, perhaps rounded in another unit.
        is_near = math.isclose(rates[0][1], rate, rel_tol=0.01)
        if rates[0][0] != rates[-1][0] or not is_near:
            return None
    if rates:
        return rates[0]
    found: dict[int, float] = {}
    finest = float("inf")
    for number, unit in _UNIT.findall(text):
        known = _unit(unit)
        if known is None or known[1] >= finest:
            return None
        quantity, finest = known
        found[quantity] = found.get(quantity, 0.0) + float(number) * finest
    if len(found) != 1:
        return None
    ((quantity, amount),) = found.items()
    return (quantity,), round(amount, 9)


def _unit(name: str) -> tuple[int, float] | None:
    """Returns the quantity of a unit, and how many of the first unit it is, or None."""
    for form in (name, name.lower(), name.lower().removesuffix("s")):
        for quantity, factors in enumerate(_QUANTITIES):
            if form in factors:
                return quantity, factors[form]
    return None


def _scaled(found: re.Match[str]) -> str:
    return f"{float(found[1]) * _SCALES[found[2].lower()]:.15g}"


def _power(found: re.Match[str]) -> str:
    return rf"{found[1]} \cdot 10^{{{int(found[2])}}}"


if __name__ == "__main__":
    main()
