"""Words that only spelling compares: letters, yes and no, nothing, reactions, texts."""

import re

from slipstream.environments.answers import bare
from slipstream.environments.math_judge.formulas import plain_words
from slipstream.environments.math_judge.phrases import (
    FOREIGN_NEGATION,
    core,
    endings,
    is_bound,
    without_aside,
)
from slipstream.environments.math_judge.statements import without_words_commands

_ARTICLE = re.compile(
    r"^(?:(?:on|in"
    r"|at|by) )?(?:(?:the"
    r"|a|an)\s+)?",
    re.IGNORECASE,
)
_ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
_IS_THE = re.compile(
    r"^(.{1,60}?) (?:is"
    r"|was|would be"
    r"|must be) (?:the"
    r"|our|correct"
    r"|right)\b",
    re.DOTALL,
)
_QUOTED = re.compile(
    r"[\"“«]([^\"”»]{1,60})[\"”»]"
    r"|(?<![A-Za-z])'([^']{1,60})'(?![A-Za-z])"
)
DENIED = re.compile(
    r"\b(?:not|never"
    r"|neither|nor"
    r"|no longer|isn't"
    r"|wasn't)\b|n't\b"
    rf"|{FOREIGN_NEGATION.pattern}",
    re.IGNORECASE,
)
# Numbers of programs: 0xff, 0b1011, 0o17.
_PREFIXED = re.compile(r"0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+")
# Addresses, versions, scores and cells: 192.168.0.1, v1.2.3, 3-1, 12-34-56, A1:B2.
_PARTS_OF_CODE = re.compile(r"v?\d+(?:\.\d+){2,}|\d+(?:-\d+)+|[A-Z]+\d+(?::[A-Z]+\d+)+")
# A range, and how sentences write one.
_RANGE = re.compile(r"\d+-\d+")
_SAID_RANGE = re.compile(
    r"(?:from )?(\d+) ?(?:to|–|—) ?(\d+)|between (\d+) and (\d+)",
    re.IGNORECASE,
)
_CHEMISTRY = re.compile(r"\\ce\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_ARROW = re.compile(
    r"\\(?:longrightarrow"
    r"|rightarrow|to"
    r"|rightleftharpoons"
    r"|xrightarrow\{[^{}]*\})(?![A-Za-z])"
    r"|→|⟶|⇌|->|=>|--+>"
)

_TRUTHS = {"yes": True, "no": False, "true": True, "false": False}
_TRUTH_WORD = re.compile(
    r"\b(yes|no|true"
    r"|false|correct"
    r"|incorrect|right"
    r"|wrong)\b",
    re.IGNORECASE,
)
_NOTHING = {
    "empty": re.compile(
        r"\\emptyset|\\varnothing"
        r"|∅|\\\{\s*\\?\}"
        r"|\bempty set\b"
        r"|\b(?:no|without)(?: real"
        r"| integer| such"
        r"| valid| possible)?"
        r" (?:solutions?"
        r"|roots?|values?"
        r"|answers?)\b"
        r"|\b(?:has|have"
        r"|is|are) no(?: real)? (?:solutions?"
        r"|roots?)\b"
        r"|(?:^|\b(?:is"
        r"|prints?|returns?) )none$"
        r"|\bnull set\b",
        re.IGNORECASE,
    ),
    "undefined": re.compile(
        r"^(?:the (?:limit"
        r"|value|expression"
        r"|answer) )?(?:(?:does"
        r"|do) not exist"
        r"|doesn't exist"
        r"|DNE|is undefined"
        r"|undefined|is not defined"
        r"|not defined)\b"
        r"|\b(?:does not exist"
        r"|doesn't exist"
        r"|is undefined"
        r"|is not defined)\b",
        re.IGNORECASE,
    ),
}


class Truth:
    """Yes or no, true or false."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._pair = ("yes", "no") if word in ("yes", "no") else ("true", "false")

    @classmethod
    def read(cls, text: str) -> "Truth | None":
        word = bare(text).casefold()
        return cls(word) if word in _TRUTHS else None

    def agrees(self, phrase: str) -> bool | None:
        text = plain_words(without_aside(phrase))
        words = [match[1].casefold() for match in _TRUTH_WORD.finditer(text)]
        verdicts = [word for word in words if word in self._pair]
        if not verdicts and self._pair[0] == "true":
            synonyms = {"correct": "true", "right": "true", "incorrect": "false", "wrong": "false"}
            verdicts = [synonyms[word] for word in words if word in synonyms]
        if not verdicts:
            return None
        if len({*verdicts}) > 1:
            # "Yes, there is no doubt" begins with its verdict.
            first = re.match(rf"\W*(?:{'|'.join(self._pair)})\b(?=[,.!;: ]|$)", text, re.IGNORECASE)
            if first is None or re.search(r"\b(?:or|and)\b", text):
                return False
        is_denied = re.search(
            r"(?:\bnot|n't)\s+(?:\w+\s+)?(?:yes"
            r"|no|true|false"
            r"|correct|right)\b",
            text,
            re.IGNORECASE,
        )
        says = _TRUTHS[verdicts[0]] != (is_denied is not None)
        return says == _TRUTHS[self._word]


class Nothing:
    """The empty set and no solution, or a value that does not exist."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    @classmethod
    def read(cls, text: str) -> "Nothing | None":
        short = plain_words(bare(text))
        for kind, form in _NOTHING.items():
            if len(short.split()) <= 5 and form.search(short):
                return cls(kind)
        return None

    def agrees(self, phrase: str) -> bool | None:
        text = core(phrase)
        text = plain_words(text)
        if re.search(r"\bor\b|\bif\b|\bunless\b", text):
            return False
        for kind, form in _NOTHING.items():
            if form.search(text) or form.search(plain_words(phrase)):
                return kind == self._kind
        return False if re.search(r"\d", text) else None


class Word:
    """Letters and digits that are no formula: a word, a code, a Roman numeral, a substance."""

    def __init__(self, text: str) -> None:
        self._text = spelled(text)

    @classmethod
    def read(cls, text: str) -> "Word | None":
        short = spelled(text)
        if _PREFIXED.fullmatch(short) or _PARTS_OF_CODE.fullmatch(bare(text)):
            return cls(text)
        # Substances with groups, such as Ca(OH)2.
        if re.fullmatch(
            r"(?:[A-Z][a-z]?\d*"
            r"|\((?:[A-Z][a-z]?\d*)+\)\d*){2,}",
            short,
        ):
            return cls(text)
        is_word = re.fullmatch(r"(?=.*[A-Za-zÀ-ɏ])[A-Za-zÀ-ɏ0-9'+-]+", short) is not None
        is_product = re.fullmatch(r"-?\d*\.?\d*[a-z]", short) is not None
        is_power = re.fullmatch(
            r"[+-].*|.*[a-z]\^.*"
            r"|.*[+-]\d+|-?\d+(?:\.\d+)?e[+-]?\d+",
            short,
        )
        # "2ab" is a product, and "2b1a" a code.
        is_monomial = re.fullmatch(r"\d+[a-z]{2,3}", short) is not None
        is_sum = re.search(r"[a-z0-9][+-][a-z0-9]", short) and not re.search(r"[A-Za-z]{2}", short)
        if not is_word or is_product or is_power or is_monomial or is_sum:
            return None
        return cls(text)

    def agrees(self, phrase: str) -> bool | None:
        text = without_aside(phrase)
        if DENIED.search(text):
            return False
        candidates = [spelled(ending) for ending in endings(core(text))]
        if (subject := _IS_THE.match(core(text))) is not None:
            candidates.append(spelled(subject[1]))
        candidates += [_ARTICLE.sub("", candidate) for candidate in candidates]
        if _RANGE.fullmatch(self._text):
            ranges = [_SAID_RANGE.fullmatch(candidate) for candidate in candidates]
            for found in filter(None, ranges):
                low, high = found.groups()[:2] if found[1] else found.groups()[2:]
                candidates.append(f"{low}-{high}")
        quoted = [first or second for first, second in _QUOTED.findall(text)]
        candidates += [spelled(quote) for quote in quoted[-1:]]
        if any(self._same(candidate) for candidate in candidates):
            return True
        return None if len(text.split()) > 6 and not self._is_in(text) else False

    def _is_in(self, text: str) -> bool:
        return self._text.casefold() in text.casefold()

    def _same(self, text: str) -> bool:
        if text == self._text:
            return True
        right = self._text
        letters = re.sub(r"[^A-Za-z]", "", right)
        if _PREFIXED.fullmatch(right):
            return text.casefold() == right.casefold()
        if _letters_joined(text) == right and re.fullmatch(r"[A-J]+", right):
            return True
        is_short = len(letters) <= 3 or re.search(r"\d", right) is not None
        if is_short and not right.islower():
            # Co is no CO, but co may be either.
            return text.casefold() == right.casefold() and (
                text.islower() or right.isupper() and text.isupper()
            )
        return text.casefold() == right.casefold()


def _letters_joined(text: str) -> str:
    """Returns the letters of "A, B and C" without what joins them, or ""."""
    parts = re.split(
        r"\s*,\s*(?:and\s+)?"
        r"|\s+and\s+|\s*&\s*|\s+",
        text.strip(),
    )
    return "".join(parts) if all(re.fullmatch(r"\(?[A-J]\)?", part) for part in parts) else ""


class Reaction:
    """A chemical equation: substances and their numbers on two sides of an arrow."""

    def __init__(self, sides: tuple[list[str], ...]) -> None:
        self._sides = sides

    @classmethod
    def read(cls, text: str) -> "Reaction | None":
        if not _ARROW.search(_CHEMISTRY.sub(r"\1", text)):
            return None
        sides = cls._sides_of(text)
        return None if sides is None else cls(sides)

    @staticmethod
    def _sides_of(text: str) -> tuple[list[str], ...] | None:
        text = without_words_commands(_CHEMISTRY.sub(r"\1", text))
        # A reply may write the arrow as a sign of equality.
        parts = _ARROW.split(text) if _ARROW.search(text) else text.split("=")
        if len(parts) != 2:
            return None
        sides = []
        for part in parts:
            terms = re.split(r"\s+\+\s+|(?<=[\w)}])\+(?=[\dA-Z])", spelled(part, keeps_spaces=True))
            sides.append(sorted(re.sub(r"\s", "", term) for term in terms))
        return tuple(sides)

    def agrees(self, phrase: str) -> bool | None:
        text = re.sub(r"^.*?(?:\bis|:)\s+(?=\S*\d*[A-Z\\$(])", "", without_aside(phrase))
        sides = self._sides_of(text)
        return None if sides is None else sides == self._sides


class Text:
    """Any other text, in upper or lower case."""

    def __init__(self, text: str) -> None:
        self._text = _folded(text)

    def agrees(self, phrase: str) -> bool | None:
        text = core(phrase)
        candidates = [_folded(candidate) for candidate in (*endings(text), phrase)]
        if (subject := _IS_THE.match(text)) is not None:
            candidates.append(_folded(subject[1]))
        quoted = [first or second for first, second in _QUOTED.findall(phrase)]
        if self._text in (*candidates, *map(_folded, quoted[-1:])):
            return True
        is_denied = DENIED.search(phrase) is not None and DENIED.search(self._text) is None
        return False if is_denied or is_bound(text, self._text) else None


def spelled(text: str, *, keeps_spaces: bool = False) -> str:
    r"""Returns the letters and digits of a text: $\mathrm{H_{2}O}$ and H₂O are H2O."""
    text = _CHEMISTRY.sub(r"\1", text)
    text = plain_words(text.translate(_SUBSCRIPTS))
    text = re.sub(r"(?<=[A-Za-z)\]])_\{?(\d+)\}?", r"\1", text)
    text = re.sub(r"\^\{?(\d*[+-]|[+-]\d*)\}?", r"\1", text)
    text = re.sub(r"\\[,;:! ]|[{}]", "", text)
    text = text if keeps_spaces else bare(text).strip()
    return text.strip("\"'“”«». ")


def _folded(text: str) -> str:
    text = plain_words(bare(text)).casefold()
    text = _ORDINAL.sub("", _ARTICLE.sub("", text.strip()))
    text = re.sub(r"(?<=\d) to (?=\d)", "-", text)
    return re.sub(r"[\s.,;:!\"'“”’-]+", " ", text).strip()
