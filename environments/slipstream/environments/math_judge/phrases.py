"""Cuts a phrase to the answer in it, and knows the words that make it none."""

import re

from slipstream.environments.answers import bare

# Words of other languages that say what an answer is not: before it, and behind it.
_NEGATIONS = (
    # German, French, Spanish and Catalan, Portuguese, Italian.
    r"nicht|keine?|n'est|pas|no (?:es|son|és)|não|non",
    # Dutch, Swedish, Danish and Norwegian, Finnish, Polish and Czech, Hungarian, Romanian.
    r"niet|geen|inte|ikke|ei ole|nie (?:jest|są|to)|není|nem|nu este",
    # Russian and Ukrainian, Greek, Indonesian, Vietnamese, Hebrew, Arabic.
    r"не|δεν|bukan|không phải|לא|ليست?",
)
_NEGATIONS_BEHIND = r"değil|नहीं|아니|아닙|ではな|ではあり|じゃな|じゃあり"
FOREIGN_NEGATION = re.compile(
    rf"(?<!\\)\b(?:{'|'.join(_NEGATIONS)})\b(?!-)"
    rf"|不[是为]|並非|并非|ไม่ใช่|{_NEGATIONS_BEHIND}",
    re.IGNORECASE,
)
# Asides: a value that the answer is not, or a reason.
_ASIDE = re.compile(
    r"\s*\((?:or|i\.?e\.?|that is|which is|equivalently|about|approximately|roughly)\b[^()]*\)"
    r"|,? as (?:desired|required|claimed|expected|needed|wanted|stated)\b.*$"
    r"|,? which (?:matches|corresponds to|is (?:option|choice|answer)|agrees with)\b.*$"
    r"|\s*\((?:check|verification|note|proof)\b[^()]*\)"
    r"|(?<!\s),?\s*+不是[^.]*$"
    rf"|,\s+(?:und |et |y |e |и )?(?:{FOREIGN_NEGATION.pattern})[^.]*$"
    r"|(?<!\s),?\s*+\bnot\b[^.]*?\bbut\b"
    r"|\b(?:(?:definitely|certainly|clearly) )?(?:not|neither) [^.;,]{1,40}[;,]\s+"
    r"(?=(?:it|that)(?:'s| is)\b)"
    r"|(?<!\s)(?<!\bis)(?<!\bare)(?<!\bwas)(?<!\bbe)(?<!\bdo)(?<!\bdoes)(?<!\bdid)(?<!\bcan)"
    r",?\s++\(?(?:and |but )?not\b.*$"
    r"|(?<!\s),?\s++\(?(?:(?:and |but )?(?:rather than|instead of)|because|since|whereas"
    r"|(?:even )?though|although|as (?:it|this|that|they|we|\w+ is|\w+ are)(?:'s)?)\b.*$",
    re.DOTALL | re.IGNORECASE,
)
# Words behind an answer: 7 is the answer.
_TAIL = re.compile(
    r"\s+(?:is|are|was|must be|should be) (?:therefore |thus )?(?:the|our|my|your)"
    r" (?:final |correct |right |required )*(?:answers?|solutions?|results?|values?)\W*$",
    re.IGNORECASE,
)
# Words before an answer.
_LEAD = re.compile(
    r"\s*(?:(?:so|thus|hence|therefore|then|consequently|finally|overall|and|ok(?:ay)?|well"
    r"|in conclusion|to conclude|in summary|as a result|altogether|in total|this means(?: that)?"
    r"|we (?:have|see|find|conclude|obtain|know)(?: that)?)\b[,:]?\s+)*+"
    r"(?:(?:i|we)(?:'d|'ll| would| will)? (?:say|think|get|got|believe|answer|conclude|find|have"
    r"|obtain)(?: that)?(?: it is| it's)?:?\s+"
    r"|(?:it|that|this|he|she|they|these|there)(?:'s| is| are| was| were| should be| must be"
    r"| would be| will be| makes| equals| comes to| amounts to)"
    r"(?: written| spelled| called)?:?\s+)?",
    re.IGNORECASE,
)
# The words before the value that a sentence ends with: the parity is even.
_ENDS_WITH = re.compile(
    r"(?:(?!\b(?:not|no|never|nobody|if|whether|or)\b|n't)[^.!?\n])*"
    r"\b(?:is|are|was|were|equals?|becomes?|be|called|named|spells|reads|gives?|yields?|says?"
    r"|prints?|outputs?|returns?|shows?|displays?|forms?|lautet|totals?"
    r"|get|obtain|have|to|ist|est|es|é|è|raises?|throws?"
    r"|(?:has|have) the (?:\w+ )?formula"
    r"|(?:falls?|fell|lands?|happens?|occurs?) (?:on|in))"
    r"(?: (?:therefore|thus|then|simply|just|exactly|indeed|written|spelled|denoted|called|named"
    r"|given by|equal to|as))*+"
    r"(?: that)?:? ",
    re.IGNORECASE,
)
# A sentence that gives no answer, whatever else it says.
_NO_ANSWER = re.compile(
    r"\b(?:i|we) (?:do not|don't|cannot|can't|can not|could not|couldn't) "
    r"(?:really |actually |possibly )?(?:know|say|tell|decide|determine|answer|be sure|find)"
    r"|\b(?:i am|i'm|we are|we're) (?:not (?:\w+ )?(?:sure|certain)|unsure|uncertain|guessing)"
    r"|\bno (?:idea|clue)\b|\bnot enough information\b|\bhard to (?:say|tell)\b"
    r"|\b(?:all|any|both|each|either|several)\b[^.]*"
    r"\b(?:plausible|possible|could be|may be|might be)"
    r"|\b(?:are|seem|is) (?:all |both |equally )?plausible\b|\bi (?:doubt|guess)\b"
    r"|\bimpossible to (?:say|tell|know|determine)\b|\bcannot be determined\b",
    re.IGNORECASE,
)
# Words before a number that make it a bound, a guess or no answer.
_BOUND = re.compile(
    r"\b(?:not|at least|at most|(?:less|more|fewer|greater|larger|smaller|higher|lower) than"
    r"|between|neither|nor|maybe|perhaps|possibly|probably not|never|cannot"
    r"|(?:could|might|may) (?:also )?be"
    r"|(?:min|max)imum of|anything but|no (?:more|less|fewer) than|exceeds?"
    rf")\b|{FOREIGN_NEGATION.pattern}"
    r"|\bis (?:wrong|incorrect|false)\b"
    r"|n't (?:(?:be|equal(?: to)?|have been) )?(?=[-\d])"
    r"|(?<!\d )\b(?:over|under|up to|nearly|almost) -?[\d.,%]+\Z|\d\+\s*\Z"
    r"|\d or (?:more|less|fewer|so)\b|\d (?:or )?(?:below|above)\b|\b(?:below|above) -?\d",
    re.IGNORECASE,
)
_EITHER = re.compile(r"\d\S{0,40}(?: \S{1,20})? or \S{0,40}\d")
_OR = re.compile(
    r"(?<!\()\bor\b(?! (?:equivalently|simply|in other words|about|approximately|rather))"
)
# Questions whose lists have an order.
_ASKS_ORDER = re.compile(
    r"\b(?:in (?:the |an? )?(?!any\b)(?:\w+ )?(?:order|sequence)\b"
    r"|(?:as|de)scending|sort(?:ed)?\b|rank|arrange\b|chronological|permutation"
    r"|from (?:the )?(?:smallest|largest|least|greatest|lowest"
    r"|highest|first|earliest|oldest|youngest|left)\b)",
    re.IGNORECASE,
)
_ANY_ORDER = re.compile(r"\bany order\b|\border (?:does not|doesn't) matter\b", re.IGNORECASE)


def asks_order(question: str) -> bool:
    """Whether a question asks for its values in a certain order."""
    return _ASKS_ORDER.search(question) is not None and not _ANY_ORDER.search(question)


def core(phrase: str) -> str:
    """Returns a phrase without asides, words before the answer and marks around it."""
    text = _TAIL.sub("", phrase)
    for _ in range(2):
        shorter = _ASIDE.sub("", text).strip()
        # An aside alone stays, and makes the phrase no answer.
        text = shorter if re.search(r"\w", shorter) else text
        text = _LEAD.sub("", text, count=1)
    return bare(text)


def without_aside(phrase: str) -> str:
    """Returns a phrase without what it says that the answer is not, and without reasons."""
    shorter = _ASIDE.sub("", phrase).strip()
    return shorter if re.search(r"\w", shorter) else phrase


def endings(text: str) -> list[str]:
    """Returns the text, and what it ends with behind "is" and its like, in marks of none."""
    matches = [text]
    shorter = _ENDS_WITH.sub("", text, count=1)
    if shorter != text:
        matches.append(bare(shorter))
    return matches


def gives_no_answer(phrase: str) -> bool:
    """Whether a phrase says that its author does not know the answer."""
    return _NO_ANSWER.search(phrase) is not None


def names_several(text: str) -> bool:
    """Whether a text has "or" between values, outside of brackets such as "(or 0.5)"."""
    return _OR.search(text) is not None


def is_bound(text: str, right_text: str) -> bool:
    """Whether a text gives a bound, a guess or several values where the answer does not."""
    return any(
        form.search(text) is not None and form.search(right_text) is None
        for form in (_BOUND, _EITHER)
    )
