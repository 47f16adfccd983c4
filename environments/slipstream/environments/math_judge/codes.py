"""Rows of codes, whose places count: moves, notes, bases, digits of a permutation."""

import re

from slipstream.environments.math_judge.formulas import has_words, is_function, plain_words
from slipstream.environments.math_judge.phrases import asks_order, core, endings, without_aside
from slipstream.environments.math_judge.words import DENIED, spelled

MAX_CODES = 200
_CODE = re.compile(r"[A-Za-z0-9]+['’#♯♭]*")
_VARIABLE = re.compile(r"[a-z]")
_SIZES = re.compile(r"\d+ x \d+")
# A shell of electrons, such as 2p6 or 2p^6.
_SHELL = re.compile(r"[1-8][spdf]\^?\d{1,2}")
_SEPARATOR = re.compile(
    r"\s*(?:[,;]"
    r"|->|→|⟶"
    r"|\\(?:right|longright)?arrow\b"
    r"|\\to\b"
    r"|[-–—>](?=\s))\s*(?:(?:and|then)\s+)?"
    r"|\s+(?:and|then)\s+|\s+"
)
_OPENING = re.compile(r"^[(\[{\\]+\s*")
_CLOSING = re.compile(r"\s*[)\]}\\]+\.?$")


class Codes:
    """Several codes in a row. Shells of electrons have no order, and other codes have one."""

    def __init__(self, codes: list[str]) -> None:
        self._codes = codes
        self._are_shells = _match_all(_SHELL, codes)
        self._are_characters = all(len(code) == 1 for code in codes)

    @classmethod
    def read(cls, text: str, question: str) -> "Codes | None":
        words = plain_words(text)
        codes = spelled(words, keeps_spaces=True).split()
        if len(codes) < 2 or len(codes) > MAX_CODES:
            return None
        if _match_all(_SHELL, codes):
            shells = _without_powers(codes)
            return cls(shells)
        if not _match_all(_CODE, codes):
            return None
        if has_words(words):
            return None
        if any(map(is_function, codes)):
            return None
        if _is_product(codes) and not asks_order(question):
            return None
        return cls(codes)

    def agrees(self, phrase: str) -> bool | None:
        text = plain_words(without_aside(phrase))
        if DENIED.search(text):
            return False
        texts = [phrase]
        texts += endings(core(text))
        has_row = False
        for row in map(self._row, texts):
            if self._is_same(row):
                return True
            has_row = has_row or _are_codes(row)
        if has_row or re.search(r"\d", text):
            return False
        return None

    def _row(self, text: str) -> list[str]:
        """Returns the codes of a text, without brackets around them."""
        inside = plain_words(text)
        inside = _OPENING.sub("", inside)
        inside = _CLOSING.sub("", inside)
        written = spelled(inside, keeps_spaces=True)
        written = written.strip("()[]{} ")
        codes = _SEPARATOR.split(written)
        if self._are_shells:
            return _without_powers(codes)
        if self._are_characters and len(codes) == 1:
            joined = codes[0].replace("-", "")
            return list(joined)
        return codes

    def _is_same(self, row: list[str]) -> bool:
        if self._are_shells:
            return sorted(row) == sorted(self._codes)
        return row == self._codes


def _are_codes(row: list[str]) -> bool:
    return len(row) > 1 and _match_all(_CODE, row)


def _without_powers(shells: list[str]) -> list[str]:
    return [shell.replace("^", "") for shell in shells]


def _match_all(form: re.Pattern[str], codes: list[str]) -> bool:
    return all(form.fullmatch(code) for code in codes)


def _is_product(codes: list[str]) -> bool:
    """Whether codes are factors, as programs of algebra write them: 2 x y, a b, 4 x 3.

    Variables stand in the order of the alphabet in a product.
    """
    joined = " ".join(codes)
    if _SIZES.fullmatch(joined):
        return True
    variables = codes
    if codes[0].isdigit():
        variables = codes[1:]
    if not variables or not _match_all(_VARIABLE, variables):
        return False
    in_order = sorted({*variables})
    return in_order == variables
