"""Finds the ends of a reply: the tokens and texts at which sampling stops, and which exports name.

    python -m slipstream.core.configuration.reply_ends < FILE

Prints the ends for the settings in FILE, in the line that a run shows at its start.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.core.configuration.config_file import run_check
from slipstream.core.errors import ConfigError
from slipstream.core.models.families import family_of
from slipstream.core.models.model_sizes import read_model_table, read_table
from slipstream.core.settings.config import Config
from slipstream.core.template_values import read_template

GENERATION_CONFIG = "generation_config.json"
_PLACEHOLDER = "slipstreamreplyplaceholder"
_QUESTION = {"role": "user", "content": "a"}
_REPLY = {"role": "assistant", "content": _PLACEHOLDER}
_RESULT = {"role": "tool", "content": "a", "tool_call_id": "slpstrm00"}


class TemplateFailed(Exception):
    """Raised if a chat template writes no text for a conversation."""


@dataclass(frozen=True)
class ReplyEnds:
    """The token ids and texts that end a reply, by where they come from.

    `model` has the tokenizer's EOS and those of generation_config.json, at which engines stop by
    themselves; `template` what the chat template writes behind a reply, and `stated` those of
    `sampling.stop_token_ids`. `texts` are those of `sampling.stop`. `names` has the texts of
    tokens by their ids.
    """

    model: tuple[int, ...] = ()
    template: tuple[int, ...] = ()
    stated: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def token_ids(self) -> tuple[int, ...]:
        token_ids = (*self.model, *self.template, *self.stated)
        return tuple(dict.fromkeys(token_ids))

    @property
    def line(self) -> str:
        """The line that names all ends and their sources."""
        sources = {
            "the model": self.model,
            "the chat template": self.template,
            "sampling.stop_token_ids": self.stated,
        }
        parts: list[str] = []
        for source, token_ids in sources.items():
            if token_ids:
                names = [self._shown(token_id) for token_id in token_ids]
                parts.append(f"{_listed(names)} of {source}")
        if self.texts:
            quoted = [json.dumps(text, ensure_ascii=False) for text in self.texts]
            texts = _listed(quoted)
            remedy = "programs that serve the model must pass them as `stop`"
            parts.append(f"the texts {texts} of sampling.stop: {remedy}")
        if not parts:
            return "replies end at their limits alone"
        return f"replies end at {', '.join(parts)}"

    def _shown(self, token_id: int) -> str:
        name = self.names.get(token_id)
        return f"{name} ({token_id})" if name else str(token_id)


NO_ENDS = ReplyEnds()


def _listed(parts: Sequence[str]) -> str:
    if len(parts) < 2:
        return "".join(parts)
    beginning = ", ".join(parts[:-1])
    return f"{beginning} and {parts[-1]}"


def find_reply_ends(config: Config) -> ReplyEnds:
    """Returns the ends of replies in a run; raises ConfigError if the tokenizer cannot be read.

    With `debug.ignore_eos` replies end at what the settings state, or at their limits. In a
    client's own loop the client writes the prompts, and no chat template has a part in them.
    """
    folder = config.model.path
    server = config.rollout_server
    sampling = config.sampling
    if not (folder / "tokenizer_config.json").is_file():
        # Only a trainer works without a tokenizer.
        model = () if config.debug.ignore_eos else model_ends(folder, None)
        return ReplyEnds(model, stated=sampling.stop_token_ids, texts=sampling.stop)
    tokenizer = _tokenizer_of(folder)
    if server.chat_template is not None:
        tokenizer.chat_template = read_template(server.chat_template)
    model = model_ends(folder, tokenizer.eos_token_id)
    template = _ends_of_template(tokenizer, config, known={*model, *sampling.stop_token_ids})
    if config.debug.ignore_eos:
        model = ()
        template = ()
    added: dict[str, int] = tokenizer.get_added_vocab()
    return ReplyEnds(
        model=model,
        template=template,
        stated=sampling.stop_token_ids,
        texts=sampling.stop,
        names={token_id: text for text, token_id in added.items()},
    )


def _tokenizer_of(folder: Path) -> Any:  # noqa: ANN401 - transformers' own
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        # The code of a tokenizer raises whatever it likes for files that it does not understand.
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"model.path: the tokenizer in {folder} is unreadable: {cause}"
        ) from error


def _ends_of_template(
    tokenizer: Any,  # noqa: ANN401 - transformers' own
    config: Config,
    *,
    known: Collection[int],
) -> tuple[int, ...]:
    """Returns the ends of the chat template, without ways to go on that have a `known` end."""
    server = config.rollout_server
    if not tokenizer.chat_template or config.controller.client_loop:
        return ()
    family = family_of(read_model_table(config.model.path))
    if family.engine.is_harmony:
        # Harmony writes several messages in a reply, each with an end that is not the reply's.
        return ()
    marks = template_ends(
        _writer(tokenizer, server.chat_template_kwargs),
        tokenizer.get_added_vocab(),
        with_tools=server.tool_parser is not None,
    )
    ends: list[int] = []
    for token_ids in marks:
        last_token = token_ids[-1]
        if last_token not in ends and not set(known) & set(token_ids):
            ends.append(last_token)
    return tuple(ends)


def model_ends(folder: Path, eos: int | None) -> tuple[int, ...]:
    """Returns the ends at which engines stop by themselves: the EOS, and those of the folder.

    Without generation_config.json, config.json has them. That is how vLLM and transformers read
    a folder.
    """
    path = folder / GENERATION_CONFIG
    table = read_table(path) if path.is_file() else read_model_table(folder)
    token_ids = dict.fromkeys(listed_ids(eos))
    token_ids |= dict.fromkeys(listed_ids(table.get("eos_token_id")))
    return tuple(token_ids)


def listed_ids(eos: object) -> list[int]:
    """Returns the token ids in a field `eos_token_id`: a number, a list of numbers, or nothing."""
    if isinstance(eos, int):
        return [eos]
    if not isinstance(eos, list):
        return []
    return [token_id for token_id in eos if isinstance(token_id, int)]


# Returns the text that a template writes behind a reply, closed, which these messages follow.
Write: TypeAlias = Callable[[Sequence[Mapping[str, str]]], str]


def template_ends(
    write: Write, added: Mapping[str, int], *, with_tools: bool
) -> list[tuple[int, ...]]:
    """Returns the tokens with which a chat template ends a reply, for each way to go on.

    `added` has the ids of special and added tokens by their texts. With `with_tools` the result
    of a tool may follow a reply. Texts that a template refuses to write are left out.
    """
    followers: list[list[Mapping[str, str]]] = [[_QUESTION]]
    if with_tools:
        followers.append([_RESULT])
    ends: list[tuple[int, ...]] = []
    for following in followers:
        with contextlib.suppress(TemplateFailed):
            closing = write([])
            marks = end_of_reply(closing, partial(write, following), added)
            token_ids = tuple(added[mark] for mark in marks)
            if token_ids and token_ids not in ends:
                ends.append(token_ids)
    return ends


def end_of_reply(closing: str, before: Callable[[], str], added: Collection[str]) -> list[str]:
    """Returns the special tokens that end a reply, [] if the template writes none.

    `closing` is the text behind a last reply; `before` returns the text behind the same reply with
    what follows it. Several tokens end a reply if they do so in both, else the first one does.
    """
    ends = leading_tokens(closing, added)
    if len(ends) == 1:
        return ends
    marks_before = leading_tokens(before(), added)
    if not ends:
        return marks_before[:1]
    if marks_before[: len(ends)] == ends:
        return ends
    return ends[:1]


def leading_tokens(text: str, added: Collection[str]) -> list[str]:
    """Returns the added tokens side by side with which `text` begins behind white space."""
    tokens: list[str] = []
    text = text.lstrip()
    while True:
        starts = [token for token in added if token and text.startswith(token)]
        if not starts:
            return tokens
        token = max(starts, key=len)
        tokens.append(token)
        text = text.removeprefix(token)


def _writer(tokenizer: Any, values: Mapping[str, Any]) -> Write:  # noqa: ANN401 - transformers'
    def write(following: Sequence[Mapping[str, str]]) -> str:
        try:
            text = tokenizer.apply_chat_template(
                [_QUESTION, _REPLY, *following],
                add_generation_prompt=False,
                tokenize=False,
                **values,
            )
        except Exception as error:
            # A template is a program, which may raise anything.
            raise TemplateFailed(str(error)) from error
        _, mark, tail = str(text).rpartition(_PLACEHOLDER)
        if not mark:
            raise TemplateFailed("the chat template leaves out the assistant's replies")
        return tail

    return write


def _show(config: Config) -> None:
    print(find_reply_ends(config).line)


if __name__ == "__main__":
    sys.exit(run_check(_show))
