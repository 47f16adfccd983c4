"""Reads answers as people and models write them: numbers, formulas, texts and blocks of code."""

import ast
import builtins
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator

# A sign belongs to a number unless it follows another one: "12-3" ends in 3.
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(rf"(?<![\w.])-?(?:{_PLAIN}|\.\d+)|\d+")
# No answer has a number of more characters, and converting one would take long.
_MAX_DIGITS = 40
_MAX_WRAPPERS = 8

# Characters by what a program writes for them: fractions, signs, symbols, full-width forms.
_FRACTIONS = {c: f" {unicodedata.normalize('NFKC', c)}".replace("⁄", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅛⅜⅝⅞"}
_SIGNS = dict.fromkeys("−–﹣", "-") | dict.fromkeys("\u00a0\u2009\u202f", " ") | {"。": ". "}
_SIGNS |= {"²": "^2", "³": "^3"} | dict.fromkeys("‘’ʼ", "'")
_SIGNS |= {"π": r"\pi ", "√": r"\sqrt ", "×": r"\times ", "∞": r"\infty "}
_SIGNS |= {"≤": r"\le ", "≥": r"\ge "} | dict.fromkeys("`\u200b\ufeff", "")
_WIDE = {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}
_CHARACTERS = str.maketrans(_FRACTIONS | _WIDE | _SIGNS)
_EAST = "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"

_THOUSANDS = re.compile(
    r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,?\\[,!;:],?|[ '’_])\d{3})+(?!\d)"
    r"|(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])"
)
_MONEY = re.compile(
    r"\\\$|[€£¥₹]\s*(?=[-.\d])|(?<=\d)\s*(?:[€£¥₹]|(?:dollars?|euros?|USD|EUR)\b)"
    r"|(?<!\$)\$(?=-?\d[\d,]*(?:\.\d+)?(?![\w\\^{]|\s*\$)([^$\n]*)(\$?))"
)
# In turn: marks of text, signs that say nothing, signs in words.
_REWRITTEN: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(rf"(?<={_EAST})(?=[-\d])|(?<=\d)(?={_EAST})"), " "),
    (re.compile(r"(?<![A-Za-z0-9)])\*\*|\*\*(?![A-Za-z0-9(])|(?<!\w)__|__(?!\w)"), ""),
    (re.compile(r"(?<![\w*])\*([^*\s](?:[^*\n]*[^*\s])?)\*(?![\w*])"), r"\1"),
    (_MONEY, lambda found: "$" if _is_formula(found[1], found[2]) else ""),
    (re.compile(r"(^|[=:(\[{$,]|\bis)([ \t]*)\+(?=[ \t]*[\d.])", re.MULTILINE), r"\1\2"),
    (re.compile(r"(?<!\d )\b(?:minus|negative) (?=[\d.])", re.IGNORECASE), "-"),
    (_THOUSANDS, lambda found: re.sub(r"\D", "", found[0])),
)
# What surrounds an answer without being part of it.
_WRAPPERS = re.compile(
    r"""\\(?:boxed|fbox|text\w*|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{(.*)\}
    | \$\$?(.*?)\$?\$ | \\\((.*)\\\) | \\\[(.*)\\\] | ~~~\w*\s(.*)~~~
    | "(.*)" | '(.*)' | “(.*)” | «(.*)»
    | \(([A-Za-z])\) | (.*?)[.!,;]+""",
    re.DOTALL | re.VERBOSE,
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=\w))")
# The last of these is the answer, where a reply has one: R1's tags, GLM-V's tokens.
_TAGGED = re.compile(
    r"<answer>(.*?)</answer>|<\|begin_of_box\|>(.*?)<\|end_of_box\|>", re.DOTALL | re.IGNORECASE
)
_JOINED = re.compile(r"[\s$,.;]*(and|or)?[\s$,.;]*")
_SAID = re.compile(
    r"(?:\b(?:answer|option|choice)(?: is|\s*:| =)|答案[是为]?)\s*:?\s*(.*?)(?=[.!?](?:\s|$)|\n|$)",
    re.IGNORECASE,
)

# A block of code: from ``` or ~~~ to the next one, or to the end of the reply.
_BLOCK = re.compile(
    r"^[ \t]*(`{3,}+|~{3,}+)[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE
)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def plain(text: str) -> str:
    """Returns `text` with numbers, signs and money as programs write them, without markup."""
    text = text.translate(_CHARACTERS)
    for pattern, written in _REWRITTEN:
        text = pattern.sub(written, text)
    return text


def _is_formula(rest: str | None, closing: str | None) -> bool:
    """Whether a formula begins at the $ before a number, with `rest` up to the next $."""
    return bool(closing) and any(sign in (rest or "") for sign in "\\=^+*/<>")


def bare(text: str) -> str:
    """Returns `text` as `plain` does, without what surrounds an answer, in single spaces."""
    text = " ".join(plain(text).split())
    for _ in range(_MAX_WRAPPERS):
        if (found := _WRAPPERS.fullmatch(text)) is not None:
            text = next(group for group in found.groups() if group is not None).strip()
    return text


def numbers(text: str) -> list[str]:
    """Returns the numbers in `text` in their order, as Python writes them."""
    return [found.replace(",", "") for found in _NUMBER.findall(plain(text))]


def last_number(text: str) -> int | float | None:
    """Returns the last number in `text`, or None if there is none or it is absurdly long."""
    found = numbers(text)[-1:]
    return number_of(found[0]) if found else None


def number_of(text: str) -> int | float | None:
    """Returns the number that `text` is, or None."""
    if len(text) > _MAX_DIGITS or _NUMBER.fullmatch(text) is None:
        return None
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def contains(text: str, answer: str) -> bool:
    """Whether `answer` stands in `text` as whole words and numbers, in upper or lower case."""
    looked_for, within = bare(answer).casefold(), " ".join(plain(text).split()).casefold()
    if not looked_for:
        return False
    word = "[0-9a-zà-ɏͰ-ԯ]"
    before = rf"(?<!{word})" + r"(?<![\d][.,])(?<!-)" * looked_for[0].isdecimal()
    after = r"(?:\.0+)?(?![.,]?\d)" * looked_for[-1].isdecimal() + rf"(?!{word})"
    begins, ends = (re.match(word, looked_for[at]) for at in (0, -1))
    pattern = f"{before if begins else ''}{re.escape(looked_for)}{after if ends else ''}"
    return re.search(pattern, within) is not None


def final_of(text: str) -> str:
    """Returns what a reply says last: in tags, boxes, behind "answer is", or in its only line."""
    if tagged := _TAGGED.findall(text):
        text = "".join(tagged[-1]).strip()
    boxes = list(_BOX.finditer(text))
    if boxes:
        said, start = _inside(text, boxes[-1].end())[0], boxes[-1].start()
        for box in reversed(boxes[:-1]):
            inside, end = _inside(text, box.end())
            if (joined := _JOINED.fullmatch(text, end, start)) is None:
                break
            said, start = f"{inside}{' or ' if joined[1] == 'or' else ', '}{said}", box.start()
        return said
    named = _SAID.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    return str(named[-1]).strip() if named else lines[0].strip() if len(lines) == 1 else ""


def is_named(text: str) -> bool:
    """Whether a reply tags or boxes its answer, or says what the answer is."""
    return (
        _TAGGED.search(text) is not None
        or _BOX.search(text) is not None
        or _SAID.search(text) is not None
    )


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


def code_of(reply: str, names: Iterable[str] = ()) -> str:
    """Returns the code of a reply: its last blocks that define `names`, and what these use.

    It is the last block if none defines one of them, and the whole reply if there is no block.
    """
    blocks = [textwrap.dedent(found[1]) for found in _BLOCK.findall(reply)]
    if not blocks:
        return reply
    needed, taken = set(names), list[str]()
    for block in reversed(blocks):
        defined, used = names_in(block)
        if needed & defined:
            taken.insert(0, block)
            needed = (needed | used) - defined - set(dir(builtins))
    return "\n".join(taken or blocks[-1:])


def names_in(code: str) -> tuple[set[str], set[str]]:
    """Returns the names that a text of Python defines, and those that it uses.

    Of a text that is no Python, these are the functions and classes whose definitions it begins.
    """
    try:
        nodes: Iterator[ast.AST] = ast.walk(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(re.findall(r"^\s*(?:async\s+)?(?:def|class)\s+(\w+)", code, re.MULTILINE)), set()
    defined: set[str] = set()
    used: set[str] = set()
    for node in nodes:
        if isinstance(node, _DEFINITIONS):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
    return defined, used
