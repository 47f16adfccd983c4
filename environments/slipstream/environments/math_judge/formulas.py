"""Finds the last formula of a phrase, and writes it as the reader of LaTeX expects."""

import re

from slipstream.environments.answers import bare
from slipstream.environments.math_judge.phrases import core, without_aside
from slipstream.environments.math_judge.statements import without_words_commands

_SEGMENT = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_FUNCTION_NAMES = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "log",
        "ln",
        "exp",
        "sqrt",
        "pi",
        "infinity",
        "max",
        "min",
        "gcd",
        "mod",
    ]
)
# Words of two letters or more that are no command of LaTeX.
_WORD = re.compile(r"(?<![\\A-Za-z{])[^\W\d_]{2,}|(?<=\{)[A-Za-z]{4,}(?=\})")
# Words of so few letters are products of variables, but for those of English.
_PRODUCT = re.compile(r"[a-z]{2,3}")
_SHORT_WORDS = frozenset(
    [
        "a",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "can",
        "did",
        "do",
        "for",
        "get",
        "got",
        "had",
        "has",
        "he",
        "her",
        "him",
        "his",
        "how",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "let",
        "may",
        "me",
        "my",
        "no",
        "nor",
        "not",
        "now",
        "of",
        "off",
        "on",
        "one",
        "or",
        "our",
        "out",
        "per",
        "put",
        "set",
        "she",
        "six",
        "so",
        "sum",
        "ten",
        "the",
        "to",
        "too",
        "two",
        "up",
        "us",
        "use",
        "was",
        "we",
        "who",
        "why",
        "yes",
        "yet",
        "you",
        "all",
        "am",
        "cm",
        "mm",
        "km",
        "kg",
        "mg",
        "ml",
        "ft",
        "lb",
        "oz",
        "hr",
        "min",
        "sec",
        "day",
        "dog",
        "cat",
        "car",
        "man",
        "men",
        "pen",
        "bus",
        "box",
        "bag",
        "cup",
        "egg",
        "red",
        "big",
        "new",
        "old",
    ]
)
# A token of a formula that is written without dollars.
_TOKEN = re.compile(
    r"-[A-Za-z]|.*[\d=+*/^<>|√∞\\≤≥].*|[-b-zB-HJ-Z]|\(?[a-z]\)?[)^]*|\[|\]|[({].*[)}]"
)
# A unit or other word behind a number, which is no part of a formula.
_UNIT_WORD = re.compile(
    r"(?:(?<=[\d})])|(?<=\\pi))\s*(?:\\(?:text|mathrm|mbox|rm)\s*\{[^{}]*\})(?:\^\{?\d\}?)?"
)
_EQUALS = re.compile(r"(?<![<>!\\])=|\\approx|≈|\\Rightarrow|\\implies|⇒|\\rightarrow|→")

# Ways to write what LaTeX writes otherwise.
_WRITTEN: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(\d+) (?:over|out of) (\d+)\b"), r"\1/\2"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\{\}"), ""),
    (re.compile(r"\{\s*([^{}]*?)\s*\\over\b\s*([^{}]*?)\s*\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\([dt]?binom)\s*(\d)\s*(\d)"), r"\\\1{\2}{\3}"),
    (re.compile(r"\\left\b\s*|\\right\b\s*|\\bigg?[lr]?\b\s*|\\displaystyle\b\s*"), ""),
    (re.compile(r"(?<![\\A-Za-z])(sin|cos|tan)h?(?:\^\{?-1\}?)(?![A-Za-z])"), r"\\arc\1"),
    (re.compile(r"\\(sin|cos|tan)\s*\^\s*\{?\s*-1\s*\}?"), r"\\arc\1"),
    (
        re.compile(
            r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp)(?![A-Za-z])"
        ),
        r"\\\1 ",
    ),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", re.IGNORECASE), r"\\infty "),
    (re.compile(r"(?<![\\A-Za-z])sqrt(\d+(?:\.\d+)?)"), r"\\sqrt{\1}"),
    (re.compile(r"\\?(?<![A-Za-z])sqrt *\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt *\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\mathrm *\{ *([eid]) *\}|\\(?:text|operatorname) *\{ *([ei]) *\}"), r"\1\2"),
    (re.compile(r"(?<=\d)\s*\*\s*(?=[\w(\\])|(?<=[\w)}])\s*\*\s*(?=[\w(\\])"), r" \\cdot "),
    (re.compile(r"\\cdotp\b"), r"\\cdot "),
    (re.compile(r"\\[,;:!] ?|\\quad\b|\\qquad\b|~"), " "),
    (re.compile(r"(?<![\d/.])(\d+) +(\d+)/(\d+)(?![\d/])"), r"(\1+\2/\3)"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)"), r"\1 \\cdot 10^{\2}"),
    (re.compile(r"\\operatorname *\{(\w+)\}"), r"\\\1"),
    (re.compile(r"\\mathbf *\{(\w)\}"), r"\1"),
)
_DEGREES = re.compile(r"(-?\d++(?:\.\d++)?) *+(?:°|\^ *\{? *\\circ *\}?|\\degree|degrees?\b)")


def as_latex(text: str) -> str:
    """Returns a formula that people or programs write, as LaTeX writes it."""
    text = _UNIT_WORD.sub("", text)
    for pattern, written in _WRITTEN:
        text = pattern.sub(written, text)
    return text.strip()


def in_radians(text: str) -> str:
    r"""Returns a formula with 60^\circ as 60 \pi / 180."""
    return _DEGREES.sub(r"(\1 \\pi / 180)", text)


def has_degrees(text: str) -> bool:
    """Whether a number of degrees stands in a text."""
    return _DEGREES.search(text) is not None


def has_words(text: str) -> bool:
    """Whether a text has words, which are neither functions nor commands of LaTeX."""
    text = re.sub(r"\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+", " ", text)
    words = _WORD.findall(text)
    has_operator = re.search(r"[-+*/^=\d]", text) is not None
    return not all(
        word.lower() in _FUNCTION_NAMES or (has_operator and _is_product(word)) for word in words
    )


def _is_product(word: str) -> bool:
    return _PRODUCT.fullmatch(word) is not None and word not in _SHORT_WORDS


def is_function(word: str) -> bool:
    """Whether a word is the name of a function or a number: sin, log, pi."""
    return word.lower() in _FUNCTION_NAMES


def last_formula(phrase: str) -> str:
    """Returns the last formula of a phrase, between dollars or not, or ""."""
    text = without_aside(phrase).strip()
    segments = list(_SEGMENT.finditer(text))
    if segments:
        behind = text[segments[-1].end() :]
        if not re.search(r"\d", behind):
            content = next(group for group in segments[-1].groups() if group is not None)
            return content.strip(" .,;")
        text = behind
    short = core(text)
    if not has_words(short):
        return short
    short = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?", " ", short)
    return _last_run(short)


def _last_run(text: str) -> str:
    """Returns the last words of a text that a formula consists of."""
    runs: list[list[str]] = [[]]
    for word in text.split():
        token = word.rstrip(",.;:?!")
        is_part = token.lower() in _FUNCTION_NAMES or (
            _TOKEN.fullmatch(token) is not None and not has_words(token)
        )
        if is_part:
            runs[-1].append(token)
        if (not is_part or token != word) and runs[-1]:
            runs.append([])
    for run in runs:
        # "A 50% chance" is no product.
        while len(run) > 1 and re.fullmatch(r"[A-Za-z] [\dA-Za-z].*", " ".join(run)):
            del run[0]
    filled = [run for run in runs if re.search(r"\d|[A-Za-z\\]", " ".join(run))]
    return bare(" ".join(filled[-1])).strip("= ") if filled else ""


def last_side(formula: str) -> str:
    """Returns what stands behind the last sign of equality of a formula."""
    return _EQUALS.split(formula)[-1].strip()


def plain_words(text: str) -> str:
    """Returns a text without commands around words, dollars and double spaces."""
    text = without_words_commands(text)
    return " ".join(re.sub(r"\\[()\[\]]|\$", " ", text).split())
