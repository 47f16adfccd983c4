"""Where thoughts end in a reply, by the marks with which models and templates write them."""

import re

# <think> of Qwen, DeepSeek, GLM, MiniMax, Nemotron, OLMo and others, with its variants.
_TAG = r"(?:\w+:)?(?i:think|thinking|thoughts?|reasoning(?:_content)?)(?::\w+)?(?:\s[^<>]*)?"
# In turn: Mistral, Gemma, Kimi, Command, Apertus, OpenThinker; gpt-oss thinks in all channels but
# `final`.
_OPENING = re.compile(
    rf"<{_TAG}>|\[THINK\]|<\|channel>thought|◁think▷|<\|START_THINKING\|>|<\|inner_prefix\|>"
    r"|<\|begin_of_thought\|>|<\|channel\|>(?!final)"
)
# The last form is that of gpt-oss without its special tokens.
_END = re.compile(
    rf"</{_TAG}>|\[/THINK\]|<channel\|>|◁/think▷|<\|END_THINKING\|>"
    r"|<\|inner_suffix\|>|<\|end_of_thought\|>"
    r"|<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
    r"|\A(?:analysis|commentary)(?s:.*)assistantfinal"
)
# The place where thoughts begin at the end of a prompt.
_OPEN = re.compile(rf"(?:{_OPENING.pattern})\s*\Z")


def split_thoughts(text: str, *, is_open: bool = False) -> tuple[str, str]:
    """Returns the thoughts in a reply, and the answer: what stands behind their last end.

    Nothing of thoughts that never end belongs to the answer. `is_open` says that the prompt has
    begun thoughts. Without thoughts the answer is `text`.
    """
    ends = list(_END.finditer(text))
    start = ends[-1].end() if ends else len(text) if is_open else 0
    opening = _OPENING.search(text, start)
    stop = opening.start() if opening else len(text)
    thoughts = f"{text[:start]}{text[stop:]}"
    return _OPENING.sub("", _END.sub("", thoughts)).strip(), text[start:stop]


def begins_thoughts(prompt: str) -> bool:
    """Whether the text of a prompt ends with the beginning of thoughts."""
    return _OPEN.search(prompt) is not None


def marks_thoughts(token: str) -> bool:
    """Whether a token's text is a mark of thoughts."""
    return bool(_OPENING.match(token) or _END.match(token))
