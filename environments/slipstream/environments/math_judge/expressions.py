"""Expressions and equations, the one kind that math-verify reads."""

import functools
import re
from fractions import Fraction
from typing import Any

from slipstream.environments.answers import bare
from slipstream.environments.math_judge.formulas import (
    as_latex,
    has_degrees,
    in_radians,
    last_formula,
    last_side,
)
from slipstream.environments.math_judge.numerals import number_in, same_number
from slipstream.environments.math_judge.phrases import core, is_bound, names_several
from slipstream.environments.math_judge.sizes import TooLarge, check_size, check_text

# Parts of their size by which two numbers are no longer the same.
_APART = 1e-3
# Texts that math-verify would read in part.
_UNREAD = re.compile(r"\\equiv\b|\\[pb]mod\b|≡|\\triangle\b|\\angle\b|\\overline\b|\\parallel\b")
_GOES_ON = re.compile(r"\\[lcd]?dots\b|\\dots[cbmio]\b|…|\.\.\.")
_BASE = re.compile(r"[0-9A-Fa-f]+_\{?(?:\\text\{\w+\}|\w+)\}?")
# The name of what an equation defines: y = ..., f(x) = ...
_DEFINED = re.compile(r"^\s*([A-Za-z]\w*)(?:\([a-z]\))?\s*=")
# A matrix as programs write it: [[1, 2], [3, 4]].
_ROWS = re.compile(r"\[\s*\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*\s*\]")
_NATURAL_LOG = re.compile(r"\\log(?!\s*_)")


@functools.lru_cache(maxsize=64)
def parsed(formula: str) -> Any:  # noqa: ANN401 - an expression of sympy
    """Returns the expression that a formula writes, None if math-verify cannot read all of it.

    Raises TooLarge for an expression that is not evaluated.
    """
    import sympy
    from latex2sympy2_extended.math_normalization import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    latex = as_latex(formula)
    check_text(latex)
    if not latex or _UNREAD.search(latex):
        return None
    # Units are read elsewhere: math-verify would take the ab of 3ab for one.
    forms = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    # The caller limits the time; math-verify's own limit would need signals.
    results = parse(
        f"${latex}$",
        extraction_config=[LatexExtractionConfig(normalization_config=forms)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not results or isinstance(results[0], str):
        return None
    expression = results[0]
    check_size(expression)
    symbols: set[Any] = getattr(expression, "free_symbols", set())
    imaginary = {symbol: sympy.I for symbol in symbols if symbol.name == "i"}
    # A letter i that stands alone or counts the terms of a sum is no imaginary unit.
    if imaginary and expression not in imaginary:
        expression = expression.subs(imaginary)
    return expression


def value_of(formula: str) -> Fraction | None:
    """Returns the value of a formula without letters, None if it has none."""
    try:
        expression = parsed(in_radians(last_side(formula)))
        if expression is None or getattr(expression, "free_symbols", None):
            return None
        exact = _fraction(expression.doit())
        if exact is not None:
            return exact
        number = expression.evalf(30)
    except (AttributeError, TypeError, ValueError, ArithmeticError):
        return None
    if getattr(number, "is_Float", False):
        return Fraction(str(number))
    return _fraction(number)


def _fraction(number: Any) -> Fraction | None:  # noqa: ANN401
    if not getattr(number, "is_Rational", False):
        return None
    return Fraction(int(number.p), int(number.q))


def same_expression(right: str, formula: str) -> bool | None:
    """Whether two formulas are equal; None if the second one cannot be read."""
    from math_verify import verify

    try:
        # Alone, i is a letter; in a sum, it is the imaginary unit.
        expression = parsed("0 + i" if formula.strip() == "i" else formula)
        right_expression = parsed(right)
        if expression is None or right_expression is None:
            return None
        if not verify(right_expression, expression, timeout_seconds=None):
            return False
        if not _is_near(right_expression, expression):
            return False
    except TooLarge:
        return None
    return True


def _is_near(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Whether two numbers differ by a small part of their size: math-verify rounds to 6 places."""
    for value in (one, other):
        if not getattr(value, "is_number", False):
            return True
    size = one.evalf(15)
    other_size = other.evalf(15)
    if size == other_size:
        return True
    difference = abs(size - other_size)
    largest = max(abs(size), abs(other_size))
    return bool(difference <= _APART * largest)


class Expression:
    """A formula with letters, signs or functions, or an equation."""

    def __init__(self, text: str) -> None:
        # A mark behind a number is a factorial here.
        self._text = text.strip("$ .") if "!" in text else bare(text)
        self._compact = _compact(self._text)
        self._is_text = _GOES_ON.search(text) is not None or _UNREAD.search(text) is not None

    def agrees(self, phrase: str) -> bool | None:
        text = core(phrase)
        if names_several(text):
            return False
        formula = last_formula(phrase)
        is_factorial = phrase.rstrip("$ .").endswith("!")
        if is_factorial and formula and not formula.endswith("!"):
            formula += "!"
        if self._compact in (_compact(text), _compact(formula)):
            return True
        if not formula:
            return None
        if self._is_text or is_bound(text, self._text):
            return False
        if "matrix}" in self._text and _ROWS.fullmatch(formula):
            formula = _matrix(formula)
        if _BASE.fullmatch(formula):
            return False
        right = self._text
        is_angle = "\\pi" in right and has_degrees(phrase)
        if has_degrees(right) or is_angle:
            right = in_radians(right)
            formula = last_formula(in_radians(phrase))
        return _same(right, formula)


def _same(right: str, formula: str) -> bool | None:
    """Whether a formula, or what it defines, is the right one; None if it cannot be read."""
    side = last_side(formula)
    right_side = last_side(right)
    is_equation = side != formula
    is_right_equation = right_side != right
    if is_equation and not is_right_equation:
        # An equation ends in the value of what it defines.
        formula = side
    elif is_right_equation and not is_equation and _DEFINED.match(right):
        right = right_side
    elif _define_the_same(right, formula):
        right = right_side
        formula = side
    number = number_in(formula, reads_words=False)
    if number is not None:
        return _is_value(right, number)
    result = same_expression(right, formula)
    if not result and _NATURAL_LOG.search(formula) and "\\ln" in right:
        # Mathematicians write log for the natural one, and the answer says which is meant.
        natural = _NATURAL_LOG.sub(r"\\ln", formula)
        result = same_expression(right, natural)
    if result is not None:
        return result
    value = value_of(formula)
    return None if value is None else _is_value(right, value)


def _matrix(rows: str) -> str:
    """Returns a matrix of rows in brackets as LaTeX writes it."""
    cells = [row.replace(",", " & ") for row in re.findall(r"\[([^\[\]]*)\]", rows)]
    return r"\begin{pmatrix}" + r" \\ ".join(cells) + r"\end{pmatrix}"


def _is_value(right: str, number: Fraction) -> bool:
    value = value_of(right)
    return value is not None and same_number(value, number)


def _define_the_same(right: str, formula: str) -> bool:
    """Whether two equations define one name in two ways: "v(t) = 3t" and "v = 3t"."""
    definition = _DEFINED.match(right)
    other_definition = _DEFINED.match(formula)
    if definition is None or other_definition is None:
        return False
    return definition[1] == other_definition[1] and definition[0] != other_definition[0]


def _compact(text: str) -> str:
    text = _GOES_ON.sub("…", as_latex(text))
    text = re.sub(r"[\s$]|\\text|\\mathrm", "", text)
    return re.sub(r"\{(\w)\}", r"\1", text)
