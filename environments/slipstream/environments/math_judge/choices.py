"""Choices: right answers that are a letter of several offered ones, perhaps with its value."""

import re
from collections.abc import Callable

from slipstream.environments.answers import bare
from slipstream.environments.math_judge.formulas import plain_words
from slipstream.environments.math_judge.phrases import without_aside
from slipstream.environments.math_judge.verdict import RightAnswer

# The right answer: B, (B), \textbf{(C)}\ 12, A) 5, (B) Paris.
_LETTER_ALONE = re.compile(r"\(?([A-Z])\)?")
_LETTER_AND_VALUE = re.compile(r"(?:\(([A-J])\)[\s.:)]*|([A-J])[).:]\s+)(\S.*)")
_LETTER = r"(?:\(([A-Z])\)|\[([A-Z])\]|(?<![\w'(\[.^-])([A-Z])(?![\w'’]|\.\w))"
_NAMED = re.compile(_LETTER)
# A letter that begins a reply and is marked as a choice, before what it stands for.
_BEGINS = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(([A-Z])\)|([A-Z])[).:]|([A-Z])(?=\s*[—–]\s|\s-\s|,\s|[\u3040-\u30ff\uac00-\ud7af]))"
    r"[\s,—–-]*(.*)",
    re.DOTALL | re.IGNORECASE,
)
_WORDS_OF_CHOICE = (
    r"(?:options?|choices?|answers?|letter|statement|choose|chose|pick|picked|select|selected"
    r"|go with|going with|went with)"
)
_CHOSEN = re.compile(
    rf"\b{_WORDS_OF_CHOICE}(?:\s+(?:is|should be|must be|would be|will be)|\s*:)?\s+\W{{0,3}}"
    r"([A-Z])(?![\w'’])",
)
_IS_CORRECT = re.compile(
    r"([A-Z])\W{0,3}\s+(?:is|was|must be|should be|seems)\s+(?:(?:definitely|clearly|indeed"
    r"|therefore|thus|the only|the|a|our|my|most)\s+)*(?:correct|right|answer|true|best|one"
    r"|choice|option|solution|valid)\b"
)
_IS_WRONG = re.compile(
    r"(?i:\b(?:eliminat\w*|rul\w+ out|exclud\w+|reject\w*|discard\w*))"
    r" [A-J](?:\W{1,3}(?:(?:and|or) )?[A-J])*(?![\w'])|"
    r"(?:\b[A-J]\W{1,3}(?:(?:and|or|&)\s+)?)+[A-J]\s+(?i:(?:are|is|can|cannot|do|all|both)\b[^,;.]*"
    r"(?:not|n't|wrong|incorrect|false|fail|out)\b)|\b(?:[A-J] and )?[A-J] (?i:fails?)\b|"
    r"(?i:\b(?:not|isn't|never|(?:everything|all|anything|any) (?:but|except(?: for)?)|except"
    r"|excludes?|eliminates?|rules? out|reject)\s+(?:be\s+|option\s+|choice\s+|choose\s+)?)"
    r"\W{0,2}[A-Z](?![\w'])"
    r"|\b[A-Z]\W{0,2}\s+(?i:(?:is|are|was|can|could|does|cannot|isn't)"
    r"(?:\s+(?:clearly|definitely|too|also))?\s*"
    r"(?:n't|not\b|wrong|incorrect|false|out\b|eliminated|impossible|small\b|large\b|big\b))"
)
_CHANGED = re.compile(
    r"\b(?:no|wait|actually|sorry|correction|rather),?\s+(?:it(?:'s| is)\s+)?\(?([A-Z])\b",
    re.IGNORECASE,
)
_HEDGE = re.compile(r"\b(?:perhaps|maybe|possibly)\b", re.IGNORECASE)
_NEGATION = re.compile(
    r"\b(?:would|do|does|did|could|can|should) ?n[o']t\b|\bcan(?:not|'t)\b|\bnot\b", re.IGNORECASE
)


# Letters by which two words are forms of one.
_STEM = 6
_ARTICLES = frozenset(
    [
        "a",
        "an",
        "of",
        "the",
    ]
)
_WORDS_OF_REASON = frozenset(
    ["Because", "Since", "As", "Correct", "Right", "This", "That", "It", "Final", "True", "Yes"]
)


class Choice:
    """One letter, and the value that it stands for if the answer has one."""

    def __init__(self, letter: str, value: RightAnswer | None = None, value_text: str = "") -> None:
        self._letter = letter
        self._value = value
        self._value_text = value_text

    @classmethod
    def read(
        cls, text: str, question: str, read: Callable[[str, str], RightAnswer]
    ) -> "Choice | None":
        text = plain_words(re.sub(r"\\(?:[ ,;:!~]|q?quad\b)", " ", text))
        short = bare(text)
        if (alone := _LETTER_ALONE.fullmatch(short)) is not None:
            return cls(alone[1])
        match = _LETTER_AND_VALUE.fullmatch(text)
        if match is None:
            return None
        value_text = match[3].strip()
        return cls(match[1] or match[2], read(value_text, question), value_text)

    def agrees(self, phrase: str) -> bool | None:
        text = plain_words(re.sub(r"\\(?:[ ,;:!~]|q?quad\b)", " ", phrase))
        letter = chosen_letter(text)
        if letter:
            return letter == self._letter and self._value_agrees(text)
        if letter == "" or self._value is None:
            return None if letter is None else False
        return self._value.agrees(phrase)

    def _value_agrees(self, text: str) -> bool:
        """Whether what stands behind the letter is no other value than that of the answer."""
        match = _BEGINS.fullmatch(bare(text)) or _BEGINS.fullmatch(text)
        behind = "" if match is None else match[4].strip()
        if self._value is None:
            return True
        agrees = self._value.agrees
        if re.fullmatch(r"[-\d$].*", behind):
            return agrees(behind) is not False
        return not self._is_other_name(behind) or agrees(behind) is True

    def _is_other_name(self, behind: str) -> bool:
        """Whether words behind the letter are as short a name as the answer's, and none of it."""
        words = re.findall(r"\w+", behind)
        right_words = re.findall(r"\w+", self._value_text)
        names = [word.casefold() for word in words if word.casefold() not in _ARTICLES]
        if not names or len(words) > len(right_words):
            return False
        first_word = words[0]
        if not first_word[0].isupper() or first_word in _WORDS_OF_REASON:
            return False
        # A mitochondrion is of the mitochondria.
        right_stems = {word.casefold()[:_STEM] for word in right_words}
        stems = {name[:_STEM] for name in names}
        return right_stems.isdisjoint(stems)


def chosen_letter(text: str) -> str | None:
    """Returns the letter that a text chooses, "" if it names several, None without one."""
    short = bare(without_aside(text))
    small = re.fullmatch(r"(?:(?:option|choice|answer)\s+)?(?:\(([a-j])\)|([a-j])\)?)", short)
    if small is not None:
        return (small[1] or small[2]).upper()
    letter = _letter_at_start(short)
    if letter is not None:
        return letter
    if _HEDGE.search(short) is not None and _letters(short):
        return ""
    changed = _CHANGED.search(short)
    if changed is not None and _letters(short):
        return changed[1].upper()
    if (alone := _LETTER_ALONE.fullmatch(short)) is not None:
        return alone[1]
    choices = {match[1] for match in _CHOSEN.finditer(short)}
    choices |= {match[1] for match in _IS_CORRECT.finditer(short)}
    wrong = {letter for match in _IS_WRONG.finditer(short) for letter in _letters(match[0])}
    if len(choices) == 1:
        is_denied = _NEGATION.search(re.sub(r",.*", "", short)) is not None
        (choice,) = choices
        if choice in wrong or is_denied or _is_joined(choice, short):
            return ""
        return choice
    letters = {*_letters(short)} - wrong
    if len(letters) == 1 and not _NEGATION.search(_IS_WRONG.sub(" ", short)):
        return letters.pop()
    return "" if letters or wrong else None


def _letter_at_start(text: str) -> str | None:
    """Returns the letter that begins a text and is marked as its choice, "" if others join it.

    None means that the beginning decides nothing.
    """
    begins = _BEGINS.fullmatch(text)
    if begins is None:
        return None
    letter = next(group for group in begins.groups()[:3] if group is not None)
    if not letter.isupper():
        return None
    further_letters = {other for other in _letters(begins[4]) if other != letter}
    if not further_letters:
        is_wrong = _IS_WRONG.search(text) is not None
        return None if is_wrong else letter
    if re.search(r"[a-z]{3}", begins[4]) and begins[3] is None:
        # "B. Vitamin C" chooses B.
        is_plural = re.match(r"\W*(?:and|or|then|no|wait|actually)\b", begins[4])
        return "" if is_plural else letter
    return None


def _is_joined(letter: str, text: str) -> bool:
    """Whether a text joins its one chosen letter to others, and does not end with the choice."""
    if not re.search(r"\b(?:or|between|and)\s+(?:\w+ )?\W?[A-Z]\b", text):
        return False
    joined = re.search(rf"\b{letter}\W* (?:or|and)\b|\b(?:or|and) (?:\w+ )?\W?{letter}\b", text)
    last = re.search(rf"{_WORDS_OF_CHOICE}\W+{letter}\W*$", text)
    letters_named = {*_letters(_IS_WRONG.sub(" ", text))}
    return joined is not None and last is None and len(letters_named) > 1


def _letters(text: str) -> list[str]:
    """Returns the letters of choices that a text names; A and I may be words."""
    letters = []
    for match in _NAMED.finditer(text):
        letter = next(group for group in match.groups() if group is not None)
        behind = text[match.end() :]
        is_word = letter in "AI" and match[3] is not None and re.match(r"\s+[a-z]", behind)
        is_verb = re.match(r"\s+(?:is|was|and|or|because|since|are|must|should|then)\b", behind)
        before = text[: match.start()].rstrip().lower()
        is_named = before.endswith(("option", "choice", "answer", "is", "pick", "choose", "select"))
        if (
            not is_word
            or is_verb
            or (is_named and letter == "A" and not re.match(r"\s+[a-z]", behind))
        ):
            letters.append(letter)
    return letters
