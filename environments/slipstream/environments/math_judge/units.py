"""Units: what they measure, and how many of the first unit of their quantity they are."""

import re
from dataclasses import dataclass
from typing import TypeAlias

# A quantity as powers of its parts: metres per second are {"length": 1, "time": -1}.
Dimensions: TypeAlias = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unit:
    """A unit with its factor to the first unit of the same dimensions."""

    factor: float
    dimensions: Dimensions

    def __mul__(self, other: "Unit") -> "Unit":
        powers = dict(self.dimensions)
        for name, power in other.dimensions:
            powers[name] = powers.get(name, 0) + power
        dimensions = tuple(sorted((name, power) for name, power in powers.items() if power))
        return Unit(self.factor * other.factor, dimensions)

    def to_power(self, power: int) -> "Unit":
        """Returns the unit of a power: of a metre and 2, the square metre."""
        dimensions = tuple((name, power * exponent) for name, exponent in self.dimensions if power)
        return Unit(self.factor**power, dimensions)


# Names of each quantity's units, in numbers of its first one.
_WORDS: dict[str, dict[str, float]] = {
    "length": {
        "m": 1,
        "meter": 1,
        "metre": 1,
        "inch": 0.0254,
        "in": 0.0254,
        "foot": 0.3048,
        "feet": 0.3048,
        "ft": 0.3048,
        "yard": 0.9144,
        "yd": 0.9144,
        "mile": 1609.344,
        "mi": 1609.344,
    },
    "mass": {
        "g": 0.001,
        "gram": 0.001,
        "ton": 1000,
        "tonne": 1000,
        "lb": 0.45359237,
        "pound": 0.45359237,
        "oz": 0.028349523125,
        "ounce": 0.028349523125,
    },
    "time": {
        "s": 1,
        "sec": 1,
        "second": 1,
        "min": 60,
        "minute": 60,
        "h": 3600,
        "hr": 3600,
        "hour": 3600,
        "day": 86400,
        "week": 604800,
    },
    "months": {"month": 1, "year": 12, "yr": 12, "decade": 120, "century": 1200},
    "current": {"A": 1, "amp": 1, "ampere": 1},
    "temperature": {"K": 1, "kelvin": 1},
    "celsius": {"°C": 1, "celsius": 1},
    "fahrenheit": {"°F": 1, "fahrenheit": 1},
    "substance": {"mol": 1, "mole": 1},
    "angle": {"rad": 1, "radian": 1, "°": 0.017453292519943295, "degree": 0.017453292519943295},
    "data": {"B": 8, "byte": 8, "bit": 1, "b": 1},
    "money": {"dollar": 100, "cent": 1, "¢": 1},
}
_COMPOSED: dict[str, tuple[float, dict[str, int]]] = {
    "N": (1, {"mass": 1, "length": 1, "time": -2}),
    "J": (1, {"mass": 1, "length": 2, "time": -2}),
    "W": (1, {"mass": 1, "length": 2, "time": -3}),
    "Pa": (1, {"mass": 1, "length": -1, "time": -2}),
    "V": (1, {"mass": 1, "length": 2, "time": -3, "current": -1}),
    "C": (1, {"current": 1, "time": 1}),
    "Ω": (1, {"mass": 1, "length": 2, "time": -3, "current": -2}),
    "F": (1, {"mass": -1, "length": -2, "time": 4, "current": 2}),
    "T": (1, {"mass": 1, "time": -2, "current": -1}),
    "H": (1, {"mass": 1, "length": 2, "time": -2, "current": -2}),
    "Wb": (1, {"mass": 1, "length": 2, "time": -2, "current": -1}),
    "Hz": (1, {"time": -1}),
    "L": (0.001, {"length": 3}),
    "eV": (1.602176634e-19, {"mass": 1, "length": 2, "time": -2}),
    "cal": (4.184, {"mass": 1, "length": 2, "time": -2}),
    "gallon": (0.003785411784, {"length": 3}),
    "acre": (4046.8564224, {"length": 2}),
    "ha": (10000, {"length": 2}),
    "hectare": (10000, {"length": 2}),
    "mph": (0.44704, {"length": 1, "time": -1}),
    "kmh": (1 / 3.6, {"length": 1, "time": -1}),
    "kph": (1 / 3.6, {"length": 1, "time": -1}),
    "atm": (101325, {"mass": 1, "length": -1, "time": -2}),
}
_LONG_NAMES = {
    "newton": "N",
    "joule": "J",
    "watt": "W",
    "pascal": "Pa",
    "volt": "V",
    "coulomb": "C",
    "ohm": "Ω",
    "farad": "F",
    "tesla": "T",
    "henry": "H",
    "weber": "Wb",
    "hertz": "Hz",
    "liter": "L",
    "litre": "L",
    "l": "L",
    "calorie": "cal",
    "electronvolt": "eV",
    "amperes": "A",
}
_PREFIXES = {
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "c": 1e-2,
    "d": 1e-1,
    "m": 1e-3,
    "μ": 1e-6,
    "µ": 1e-6,
    "n": 1e-9,
    "p": 1e-12,
}
_LONG_PREFIXES = {
    "kilo": 1e3,
    "mega": 1e6,
    "giga": 1e9,
    "centi": 1e-2,
    "deci": 1e-1,
    "milli": 1e-3,
    "micro": 1e-6,
    "nano": 1e-9,
}
_PREFIXED = frozenset(
    [
        "m",
        "g",
        "s",
        "A",
        "K",
        "mol",
        "N",
        "J",
        "W",
        "Pa",
        "V",
        "C",
        "Ω",
        "F",
        "T",
        "H",
        "Wb",
        "Hz",
        "L",
        "l",
        "eV",
        "cal",
        "B",
        "b",
        "bit",
    ]
)
_LONG_PREFIXED = frozenset(
    [
        "meter",
        "metre",
        "gram",
        "second",
        "ampere",
        "mole",
        "newton",
        "joule",
        "watt",
        "pascal",
        "volt",
        "coulomb",
        "ohm",
        "farad",
        "hertz",
        "liter",
        "litre",
        "calorie",
        "byte",
        "bit",
    ]
)
_POWER_WORDS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}

_COMMANDS = re.compile(r"\\(?:text|mathrm|mbox|rm|operatorname|mathit|textrm)\b\s*")
_PART = re.compile(
    r"\s*(?P<over>/|\bper\b)?\s*(?P<times>\\cdot|\\times|[*·.](?=\s*[A-Za-z])|-(?=[a-z]))?\s*"
    r"(?P<open>\()?\s*(?P<name>°\s?[CF]\b|°|[A-Za-zμµΩ¢]+\.?)(?P<close>\))?"
    r"(?:\s*(?:\^|\*\*)\s*\(?(?P<power>-?\d)\)?|(?P<digit>[23])(?![\w.]))?(?P<end>\))?"
)


def unit_named(name: str) -> Unit | None:
    """Returns the unit of a name or sign, such as km, kilometres or °C, or None."""
    forms = [name, name.rstrip(".")]
    if len(name) > 2 or name.lower() in (
        "hr",
        "ft",
        "lb",
        "oz",
        "yd",
        "in",
        "kg",
        "km",
        "cm",
        "mm",
    ):
        lower = name.rstrip(".").lower()
        forms += [lower, lower.removesuffix("s"), lower.removesuffix("es")]
    for form in forms:
        if (unit := _exact(form)) is not None:
            return unit
    return None


def _exact(name: str) -> Unit | None:
    name = name.replace("° ", "°")
    name = _LONG_NAMES.get(name, name)
    for quantity, factors in _WORDS.items():
        if name in factors:
            return Unit(factors[name], ((quantity, 1),))
    if name in _COMPOSED:
        factor, powers = _COMPOSED[name]
        return Unit(factor, tuple(sorted(powers.items())))
    for prefixes, names in ((_PREFIXES, _PREFIXED), (_LONG_PREFIXES, _LONG_PREFIXED)):
        for prefix, factor in prefixes.items():
            rest = name.removeprefix(prefix)
            if rest != name and rest in names and (unit := _exact(rest)) is not None:
                return Unit(factor * unit.factor, unit.dimensions)
    return None


def plain_unit(text: str) -> str:
    r"""Returns a text in which units are letters: "\text{ cm}^{2}" is " cm^2"."""
    text = text.replace("$", "")
    # Behind hours, m stands for minutes: 1h30m.
    text = re.sub(r"(?<=\d) ?(?:h|hrs?) ?(\d+) ?(?:m|mins?)\b", r" h \1 min", text)
    text = re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", text)
    text = re.sub(r"\\(?:text|mathrm|mbox|operatorname|textrm|mathit)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\{?\\rm\b\s*|\\(?:,|;|:|!| )|~", " ", text)
    text = re.sub(r"(?<!\d)\s*\^\s*\{?\s*\\circ\s*\}?|\\degree\b", "°", text)
    text = re.sub(r"(?<=\d)\s*\^\s*\{?\s*\\circ\s*\}?", "°", text)
    text = re.sub(r"\\(?:Omega|mu)\b\s*", lambda m: "Ω" if "O" in m[0] else "μ", text)
    text = re.sub(
        r"\bdeg(?:rees?)?\s+(celsius|fahrenheit|C|F)\b", r"°\1", text, flags=re.IGNORECASE
    )
    text = re.sub(r"°\s*(?:celsius|C)\b", "°C", text, flags=re.IGNORECASE)
    text = re.sub(r"°\s*(?:fahrenheit|F)\b", "°F", text, flags=re.IGNORECASE)
    text = re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", text)
    return text if "\\" in text else re.sub(r"[{}]", " ", text)


def unit_at_start(text: str) -> tuple[Unit | None, str, int]:
    """Returns the unit that a text begins with, the word of it that is unknown, and its end.

    Without a unit the word is "" and the end 0.
    """
    unit: Unit | None = None
    position = 0
    pending = 0
    in_denominator = False
    while (match := _PART.match(text, position)) is not None:
        name = match["name"]
        power_word = name.lower().rstrip(".")
        if pending == 0 and power_word in _POWER_WORDS:
            power = _POWER_WORDS[power_word]
            if name.lower() in ("squared", "cubed") and unit is not None:
                return unit.to_power(power), "", match.end()
            pending = power
            in_denominator = in_denominator or bool(match["over"])
            position = match.end()
            continue
        part = unit_named(name)
        if name in ("a", "an", "each", "of") and match["over"]:
            position = match.end()
            continue
        if part is None:
            return (None, name, match.end()) if unit is None else (unit, "", position)
        if unit is not None and _is_separate_word(match):
            break
        if unit is None and match["over"]:
            return None, "", 0
        power = int(match["power"] or match["digit"] or 1) * (pending or 1)
        pending = 0
        if match["over"]:
            in_denominator = True
        if in_denominator and (match["over"] or "(" in text[:position]):
            power = -power
        unit = part.to_power(power) if unit is None else unit * part.to_power(power)
        position = match.end()
        following = re.match(r"\s+(squared|cubed)\b", text[position:])
        if following is not None:
            extra = _POWER_WORDS[following[1]]
            unit = unit * part.to_power(power * (extra - 1))
            position += following.end()
        if "(" not in text[:position]:
            in_denominator = False
    return unit, "", position if unit is not None else 0


def _is_separate_word(match: re.Match[str]) -> bool:
    """Whether the name behind a unit, with no sign between them, is no factor of the unit.

    Two units side by side are a product in science, but "5 m in total" has none.
    """
    name = match["name"]
    is_joined = match["over"] or match["times"] or match["open"]
    is_word = len(name) > 3 or name in ("in", "a", "s", "h")
    return is_word and not is_joined and not match["power"]
