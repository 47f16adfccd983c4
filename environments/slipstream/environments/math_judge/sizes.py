"""Bounds what an expression costs, before anything in it is evaluated."""

import math
import re
from typing import Any

# Most digits of a number that is evaluated, and of the value of an exponent.
MAX_DIGITS = 12_000
MAX_EXPONENT = 20_000
MAX_FACTORIAL = 3000
MAX_NODES = 400
# A sum of symbols to a higher power is not multiplied out.
MAX_EXPANDED_POWER = 40
MAX_TERMS = 2000
MAX_CHARACTERS = 600
# The reader of LaTeX takes exponentially long for brackets within brackets.
MAX_DEPTH = 12
MAX_POWERS = 24

# Binomials, which the reader of LaTeX evaluates at once.
_BINOMIAL = re.compile(r"\\[dt]?binom|\\choose|\\mod|\\[bp]mod|\\gcd|\\lcm")
_LONG_NUMBER = re.compile(r"\d{5}|[!^]")

# Functions of sympy that are evaluated, beside sums, products, powers and factorials.
_FUNCTIONS = frozenset(
    [
        "Abs",
        "Max",
        "Min",
        "acos",
        "acosh",
        "acot",
        "acsc",
        "arg",
        "asec",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "ceiling",
        "conjugate",
        "cos",
        "cosh",
        "cot",
        "coth",
        "csc",
        "csch",
        "exp",
        "floor",
        "im",
        "log",
        "re",
        "root",
        "sec",
        "sech",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    ]
)
_CONTAINERS = frozenset(
    [
        "And",
        "ComplexRegion",
        "Complement",
        "Contains",
        "Eq",
        "Equality",
        "FiniteSet",
        "GreaterThan",
        "ImageSet",
        "Interval",
        "Intersection",
        "Lambda",
        "LessThan",
        "Or",
        "StrictGreaterThan",
        "StrictLessThan",
        "Tuple",
        "Unequality",
        "Union",
        "UnevaluatedExpr",
        "Not",
        "ConditionSet",
        "ProductSet",
        "Piecewise",
        "ExprCondPair",
    ]
)
_ATOMS = frozenset(
    [
        "Symbol",
        "Dummy",
        "Wild",
        "Pi",
        "Exp1",
        "ImaginaryUnit",
        "Infinity",
        "NegativeInfinity",
        "ComplexInfinity",
        "GoldenRatio",
        "EulerGamma",
        "Reals",
        "Integers",
        "Naturals",
        "Naturals0",
        "Rationals",
        "Complexes",
        "EmptySet",
        "UniversalSet",
        "BooleanTrue",
        "BooleanFalse",
        "Str",
    ]
)
# Values that sympy finds with other methods; their limits are checked, and time ends the rest.
_CALCULUS = frozenset(["Integral", "Derivative", "Limit", "Sum", "Product"])


class TooLarge(ValueError):
    """An expression that is not evaluated: it is too large, or has a function not in the list."""


def check_text(latex: str) -> None:
    """Raises TooLarge for a formula that would take long even to read."""
    if len(latex) > MAX_CHARACTERS:
        raise TooLarge(f"a formula of {len(latex)} characters")
    depth = 0
    for character in latex:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_DEPTH:
            raise TooLarge(f"brackets in more than {MAX_DEPTH} brackets")
    if latex.count("^") > MAX_POWERS:
        raise TooLarge(f"more than {MAX_POWERS} powers")
    if _BINOMIAL.search(latex) and _LONG_NUMBER.search(latex):
        raise TooLarge("a binomial of a large number")


def check_size(expression: Any) -> None:  # noqa: ANN401 - an expression of sympy
    """Raises TooLarge if evaluating the expression could take much time or memory."""
    _digits(expression, [MAX_NODES])


def _digits(node: Any, nodes_left: list[int]) -> float:  # noqa: ANN401
    """Returns a bound of the decimal digits of a value, before and behind the point."""
    nodes_left[0] -= 1
    if nodes_left[0] < 0:
        raise TooLarge("too many parts")
    name = type(node).__name__
    if getattr(node, "is_Matrix", False):
        entries = node.flat() if hasattr(node, "flat") else list(node)
        return max((_digits(entry, nodes_left) for entry in entries), default=0.0)
    if getattr(node, "is_Rational", False):
        return _checked(max(_length(int(node.p)), _length(int(node.q))))
    if getattr(node, "is_Float", False):
        return _checked(abs(math.log10(abs(float(node)))) + 1 if float(node) else 1.0)
    if name in _ATOMS or getattr(node, "is_Symbol", False):
        return 1.0
    sizes = [_digits(part, nodes_left) for part in node.args]
    largest = max(sizes, default=0.0)
    if name in ("Add", "MatAdd"):
        return _checked(largest + math.log10(len(sizes) or 1))
    if name in ("Mul", "MatMul", "Dot", "Cross"):
        return _checked(sum(sizes))
    if name in ("Pow", "MatPow"):
        return _power(node, sizes)
    if name in ("factorial", "factorial2", "subfactorial", "binomial", "gamma"):
        return _factorial(node, sizes)
    if name == "exp":
        return _checked(min(_value(node.args[0], sizes[0]), 10.0**9) / 2 + 1)
    if name in _CALCULUS:
        _check_limits(node)
        return _checked(largest + 4)
    is_applied = type(type(node)).__name__ == "UndefinedFunction"
    if name in _FUNCTIONS or name in _CONTAINERS or is_applied:
        return largest
    raise TooLarge(f"{name} is not evaluated")


def _length(number: int) -> float:
    return abs(number).bit_length() * math.log10(2) + 1


def _checked(digits: float) -> float:
    if digits > MAX_DIGITS:
        raise TooLarge(f"a number of more than {MAX_DIGITS} digits")
    return digits


def _value(node: Any, digits: float) -> float:  # noqa: ANN401
    """Returns a bound of the absolute value of a node with so many digits."""
    if getattr(node, "is_Rational", False):
        value: float = abs(float(node)) if digits < 300 else math.inf
        return value
    return math.pow(10.0, min(digits, 300.0))


def _power(node: Any, sizes: list[float]) -> float:  # noqa: ANN401
    base, exponent = node.args
    base_digits, exponent_digits = sizes
    # An exponent with symbols has no value that is evaluated.
    if getattr(exponent, "free_symbols", None):
        return base_digits
    exponent_value = _value(exponent, exponent_digits)
    if getattr(exponent, "is_Symbol", False) or type(exponent).__name__ in _ATOMS:
        exponent_value = 4.0
    if exponent_value > MAX_EXPONENT:
        raise TooLarge(f"an exponent above {MAX_EXPONENT}")
    if getattr(base, "free_symbols", None):
        is_sum = type(base).__name__ == "Add"
        if is_sum and exponent_value > MAX_EXPANDED_POWER:
            raise TooLarge(f"a sum to a power above {MAX_EXPANDED_POWER}")
        return base_digits
    return _checked(base_digits * max(exponent_value, 1.0))


def _factorial(node: Any, sizes: list[float]) -> float:  # noqa: ANN401
    top = node.args[0]
    if getattr(node, "free_symbols", None) and getattr(top, "free_symbols", None):
        return max(sizes)
    value = _value(top, sizes[0])
    if value > MAX_FACTORIAL and getattr(top, "is_Rational", False):
        raise TooLarge(f"a factorial above {MAX_FACTORIAL}")
    if not getattr(top, "is_Rational", False) and sizes[0] > math.log10(MAX_FACTORIAL) + 1:
        raise TooLarge(f"a factorial above {MAX_FACTORIAL}")
    value = min(value, float(MAX_FACTORIAL))
    return _checked(value * math.log10(value + 1) + 1)


def _check_limits(node: Any) -> None:  # noqa: ANN401
    if type(node).__name__ not in ("Sum", "Product"):
        return
    for limits in node.args[1:]:
        bounds = [bound for bound in limits.args[1:] if getattr(bound, "is_Rational", False)]
        if len(bounds) == 2 and abs(bounds[1] - bounds[0]) > MAX_TERMS:
            raise TooLarge(f"a sum of more than {MAX_TERMS} terms")
        for bound in limits.args[1:]:
            if not getattr(bound, "free_symbols", None) and _digits(bound, [20]) > 6:
                raise TooLarge("a sum of too many terms")
