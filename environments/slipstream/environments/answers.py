"""Reads answers as people and models write them: numbers, formulas and texts."""

import contextlib
import json
import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

# A sign belongs to a number unless it follows another one: "12-3" ends in 3.
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(rf"(?<![\w.])-?(?:{_PLAIN}|\.\d+)|\d+")
# No answer has a number of more characters, and converting one would take long.
_MAX_DIGITS = 40
_MAX_WRAPPERS = 8

# The zeros of Arabic, Persian, Hindi and Bengali.
_ZEROS = (0x660, 0x6F0, 0x966, 0x9E6)
# Characters by what a program writes for them: fractions, signs, symbols, full-width forms.
_FRACTIONS = {c: f" {unicodedata.normalize('NFKC', c)}".replace("⁄", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅛⅜⅝⅞"}
_SIGNS = dict.fromkeys("−–﹣‐‑", "-") | dict.fromkeys("\u00a0\u2009\u202f", " ") | {"。": ". "}
_SIGNS |= dict.fromkeys("‘’ʼ", "'")
_SIGNS |= {chr(zero + digit): str(digit) for zero in _ZEROS for digit in range(10)}
_SIGNS |= {"π": r"\pi ", "×": r"\times ", "∞": r"\infty "}
_SIGNS |= {"≤": r"\le ", "≥": r"\ge ", "⁄": "/", "∕": "/", "·": r"\cdot ", "⋅": r"\cdot "}
# Characters without width, and marks of the direction of writing.
_SIGNS |= dict.fromkeys("\u200b\u2060\ufeff\u200e\u200f\u202a\u202c\u2066\u2068\u2069", "")
_WIDE = {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}
_CHARACTERS = str.maketrans(_FRACTIONS | _WIDE | _SIGNS)
_EAST = "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"

_THOUSANDS = re.compile(
    r"(?<![\d.])(?!0\D)\d{1,3}(?:(?:\{,\}|,?\\[,!;:],?|[ '’_])\d{3})+(?!\d)"
    r"|(?<![\d.,])(?!0,)\d{1,3}(?:,\d{3})+(?![\d,])"
    # Several points are not those of a fraction; India groups lakhs by two.
    r"|(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])|(?<![\d.,])\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])"
)


class _Currency(NamedTuple):
    """How texts name a currency: by a sign, by a word behind a number, by a code."""

    sign: str
    code: str
    words: str = ""


_CURRENCIES = {
    "dollar": _Currency(r"\\\$|\$(?=\d[\d,.]*+(?!\$))", "USD", words=r"(?:US )?dollars?"),
    "euro": _Currency("€", "EUR", words=r"euros?"),
    # A pound may be a weight.
    "pound": _Currency("£", "GBP"),
    "yen": _Currency("¥", "JPY", words="yen"),
    "rupee": _Currency("₹", "INR", words=r"rupees?"),
}
_CURRENCY_NAMES = [name for money in _CURRENCIES.values() for name in (money.words, money.code)]
_CURRENCY = rf"(?:[€£¥₹]|(?:{'|'.join(filter(None, _CURRENCY_NAMES))})\b)"
_MONEY = re.compile(
    r"\b(?:US|CA|AU)(?=\\?\$\d)|\\\$|[€£¥₹]\s*(?=[-.\d])"
    rf"|(?<=\d)\s*{_CURRENCY}|(?<=\d [mbt]illion) {_CURRENCY}|(?<=\d thousand) {_CURRENCY}"
    r"|(?<!\$)\$(?=-?\d[\d,]*(?:\.\d+)?(?![\w\\^{]|\s*\$)([^$\n]*)(\$?))"
)
# How a text names each currency, and each scale of temperature, of which the same holds.
CURRENCIES = {
    name: re.compile(
        rf"{money.sign}|\b{money.code}\b" + (rf"|\d {money.words}\b" if money.words else ""),
        re.IGNORECASE,
    )
    for name, money in _CURRENCIES.items()
}
CURRENCIES["cent"] = re.compile(r"¢|\d cents?\b", re.IGNORECASE)
_TEMPERATURES = {
    scale: re.compile(rf"(?:°|\\circ\}}?)[ $]*(?:\\\w+\{{ *)?{scale}\b", re.IGNORECASE)
    for scale in "CF"
}
# In turn: marks of text, signs that say nothing, signs in words.
_REWRITTEN: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(rf"(?<={_EAST})(?=[-\d])|(?<=\d)(?={_EAST})"), " "),
    (re.compile(r"(?<![A-Za-z0-9)])\*\*|\*\*(?![A-Za-z0-9(])|(?<!\w)__|__(?!\w)"), ""),
    (re.compile(r"(?<![\w*])\*([^*\s](?:[^*\n]*[^*\s])?)\*(?![\w*])"), r"\1"),
    # Between two dollars a formula has a sign that no amount has.
    (_MONEY, lambda found: "$" * bool(found[2] and re.search(r"[\\=^+*/<>]", found[1] or ""))),
    (re.compile(r"(^|[=:(\[{$,]|\bis)([ \t]*)\+(?=[ \t]*[\d.])", re.MULTILINE), r"\1\2"),
    (re.compile(r"(?<!\d )\b(?:minus|negative) (?=[\d.])", re.IGNORECASE), "-"),
    (re.compile(r"(?<=\d)(?:\s*\\?%|\s*per ?cent\b)"), "%"),
    (re.compile(r"√ *(?:(\d+)|\(([^()]*)\))"), r"\\sqrt{\1\2}"),
    (re.compile("√"), r"\\sqrt "),
    (re.compile(r"(?<=\d)\s*+[x*]\s*+(?=10\s*+\^)"), r" \\times "),
    (re.compile(r"\^(-\d+)"), r"^{\1}"),
    (re.compile(r"\\(?:text)?color\s*\{\w+\}"), ""),
    (re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+"), lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}"),
    # The fences of a block, with its language.
    (re.compile(r"\A\s*(?:`{3,}+|~{3,}+)[\w+-]*\n|(?<!~)~{3,}+\s*+\Z|`"), ""),
    (_THOUSANDS, lambda found: re.sub(r"\D", "", found[0])),
)
# Wrappers that surround an answer without being part of it.
_WRAPPERS = re.compile(
    r"""\\(?:boxed|fbox|text\w*|math(?:rm|bf|it|sf|tt)|mbox|underline|operatorname)\s*\{(.*)\}
    | <answer>(.*)</answer> | <\|begin_of_box\|>(.*)<\|end_of_box\|> | 【(.*)】
    | \$\$?(.*?)\$?\$ | \\\((.*)\\\) | \\\[(.*)\\\]
    | "(.*)" | '(.*)' | “(.*)” | «(.*)»
    | \(([A-Za-z])\) | (.*[^.!,;])[.!,;]+""",
    re.DOTALL | re.VERBOSE,
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{(?!\s*\})|(?=\d|[A-Za-z](?!\w)))")
# The last of these is the answer, where a reply has one: R1's tags, GLM-V's tokens.
TAGGED = re.compile(
    r"<((?:final_)?answer|\|begin_of_box\|)>((?:(?!<\1>).)*?)<(?:/(?:final_)?answer|\|end_of_box\|)>",
    re.DOTALL | re.IGNORECASE,
)
# A reply, or a block at its end, that is an object of JSON with the answer in it.
_OBJECT = re.compile(
    r"\{[^{}]*[\"'](?:final_)?answer[\"']\s*:"
    r"\s*(\"(?:[^\"\\]|\\.)*\"|'[^'{}]*'|[^,{}]*)[^{}]*\}\s*+(?:```)?\s*+\Z",
    re.IGNORECASE,
)
# A command of LaTeX, whose backslash JSON would have twice.
_COMMAND = re.compile(r"(?<!\\)\\(?!u[0-9a-fA-F]{4})[A-Za-z]{2}")
# An answer alone in the first line, before what explains it and does not take it back.
FIRST_LINE = re.compile(
    r"\s*+((?:(?!\n|=|(?<![\\A-Za-z])[A-Za-z]{2}).)++)\n\W*+(?:explanation|because|since|reason\w*|why"
    r"|note|check|steps?|work\w*|proof|solution|calculation|rationale|details|here|this|we|as|to"
    r"|[A-Z] is)\b"
    r"(?!.*\b(?:wait|actually|correction|sorry|mistake)\b)",
    re.DOTALL | re.IGNORECASE,
)
# Words for an answer before what it is, and marks behind which one stands, in other languages.
ANSWER_WORDS = r"Antwort|réponse|respuesta|resposta|risposta|ответ"
ANSWER_MARKS = r"(?:答案|答え|正解|정답)[是为选はが은는]?|(?<!不)[选選][项項择擇]?(?=\s*[A-Z(])"
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}|\s*/\s*")
_JOINED = re.compile(r"[\s$,.;]*(and|or)?[\s$,.;]*")
_SAID = re.compile(
    rf"(?:\b(?:answer|option|choice|{ANSWER_WORDS})"
    r"(?: corre[ct]ta)?(?: ist?| est?| [eé] | è|\s*:| =| -(?= [A-Z(*]))|(?<!#)####(?!#)"
    rf"|{ANSWER_MARKS})\s*:?\s*"
    r"(?:(?:\\\[|\$\$)\s*\n\s*)?(.*?)(?=[.!?](?:\s|$)|\n|$)",
    re.IGNORECASE,
)


def plain(text: str) -> str:
    """Returns `text` with numbers, signs and money as programs write them, without markup."""
    text = unicodedata.normalize("NFC", text).translate(_CHARACTERS)
    for pattern, written in _REWRITTEN:
        text = pattern.sub(written, text)
    return text


def currencies_in(text: str) -> frozenset[str]:
    """Returns the names of the currencies that a text names."""
    return frozenset(name for name, form in CURRENCIES.items() if form.search(text))


def other_money(one: str, other: str) -> bool:
    """Whether two texts name currencies or scales of temperature, and none that both name."""
    forms = [*CURRENCIES.values(), *_TEMPERATURES.values()]
    first = {form for form in forms if form.search(one)}
    second = {form for form in forms if form.search(other)}
    return bool(first and second) and first.isdisjoint(second)


def bare(text: str) -> str:
    """Returns `text` as `plain` does, without what surrounds an answer, in single spaces."""
    text = _unpacked(" ".join(plain(text).split()))
    for _ in range(_MAX_WRAPPERS):
        wrapped = _WRAPPERS.fullmatch(text)
        if wrapped is None:
            break
        content = next(group for group in wrapped.groups() if group is not None)
        # Of \mathbf{i} + \mathbf{j} no command surrounds the whole.
        if text[0] == "\\" and not _is_balanced(content):
            break
        text = content.strip()
    return text


def _is_balanced(text: str) -> bool:
    """Whether each brace that closes in a text was opened in it, and the other way round."""
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0


def numbers(text: str) -> list[str]:
    """Returns the numbers in `text` in their order, as Python writes them."""
    return [number.replace(",", "") for number in _NUMBER.findall(plain(text))]


def number_of(text: str) -> int | float | None:
    """Returns the number that `text` is, or None."""
    if len(text) > _MAX_DIGITS or _NUMBER.fullmatch(text) is None:
        return None
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def contains(text: str, answer: str) -> bool:
    """Whether `answer` stands in `text` as whole words and numbers, in upper or lower case.

    In "6 or 7" neither does, nor does a in "not a", and no number is a part of a fraction or power.
    """
    looked_for, within = (
        _FRACTION.sub(lambda f: f"{f[1]}/{f[2]}" if f[2] else "/", part).casefold()
        for part in (bare(answer), " ".join(plain(text).split()))
    )
    if not looked_for:
        return False
    word = "[0-9a-zà-ɏͰ-ԯ]"
    before = rf"(?<!{word})" + r"(?<![\d][.,/:])(?<![-^])(?<!\^\{)" * looked_for[0].isdecimal()
    if re.match(r"-\.?\d", looked_for):
        # In "10-5" is no number -5.
        before = r"(?<![\w)])(?<![\d)] )"
    number = r"(?:\.0+)?(?![.,/:]?\d)(?! ?\^| [mbt]illion| hundred| thousand)"
    after = number * looked_for[-1].isdecimal() + rf"(?!{word}|\+\+|#)"
    begins, ends = (re.match(word, looked_for[at]) for at in (0, -1))
    before = before if begins or looked_for[0] == "-" else ""
    pattern = f"{before}{re.escape(looked_for)}{after if ends else ''}"
    denied = "".join(
        rf"(?<!\b{no} )" for no in ("or", "nor", "not", "neither", "never", "anything but")
    )
    pattern = rf"{denied}(?<!n't )(?<!n't be ){pattern}(?!,? n?or )"
    return re.search(pattern, within) is not None and not other_money(text, answer)


def final_of(text: str) -> str:
    """Returns what a reply says last: in tags, JSON, boxes, behind "answer is", alone in a line.

    Such a line is the only one, or the first one before an explanation.
    """
    if tagged := TAGGED.findall(text):
        text = tagged[-1][1].strip()
    text = _unpacked(text)
    if (box := boxed(text)) is not None:
        return box[0]
    stated = _SAID.findall(text)
    if stated:
        return str(stated[-1]).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = FIRST_LINE.match(text)
    return lines[0] if len(lines) == 1 else first[1].strip() if first is not None else ""


def boxed(text: str) -> tuple[str, int] | None:
    """Returns what the last boxes contain, and where they end; None without a box.

    Boxes that only "and", "or" or marks separate are one answer. A box that never closes has "".
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    content, end = _inside(text, boxes[-1].end())
    start = boxes[-1].start()
    for box in reversed(boxes[:-1]):
        inside, inside_end = _inside(text, box.end())
        joined = _JOINED.fullmatch(text, inside_end, start)
        if joined is None:
            break
        separator = " or " if joined[1] == "or" else ", "
        content = f"{inside}{separator}{content}"
        start = box.start()
    return content, end


def packed_answer(text: str) -> str | None:
    """Returns the answer in a text that is an object of JSON or ends with one, else None."""
    match = _OBJECT.search(text)
    if match is None:
        return None
    value = match[1].strip()
    if value[:1] == '"' and not _COMMAND.search(value):
        with contextlib.suppress(ValueError):
            return str(json.loads(value, strict=False))
    return "" if value == "null" else value.strip("\"'")


def _unpacked(text: str) -> str:
    packed = packed_answer(text)
    return text if packed is None else packed


def _inside(text: str, start: int) -> tuple[str, int]:
    """Returns what a box contains that begins at `start`, and its end; "" if it never closes."""
    if text[start - 1] != "{" and (word := re.compile(r"[\w./-]+").match(text, start)):
        return word[0], word.end()
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return text[start:at], at + 1
    return "", len(text)
