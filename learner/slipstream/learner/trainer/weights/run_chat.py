"""The run's own part of an exported folder: its chat template, and the ends of its replies."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import JsonValue
from slipstream.core.configuration.reply_ends import (
    GENERATION_CONFIG,
    ReplyEnds,
    find_reply_ends,
    listed_ids,
)
from slipstream.core.models.model_sizes import read_model_table, read_table
from slipstream.core.settings.config import Config
from slipstream.core.template_values import read_template

# Fields that readers take from config.json where there is no generation_config.json.
_FALLBACK_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_VALUES = """

## Chat template

The model was trained with values of its chat template that a program must pass too
(`chat_template_kwargs`): `{}`
"""
_TEXTS = """

## End of a reply

Replies also end at these texts, which a program must pass, as `stop` to vLLM's API and as
`stop_strings`, with `tokenizer`, to `generate` of transformers: `{}`
"""
_ADAPTER_ENDS = """

## Tokens that end a reply

generation_config.json names tokens at which replies of the adapter end and those of the base model
do not. Pass them too: `vllm serve BASE --enable-lora --generation-config FOLDER` reads this folder,
and `GenerationConfig.from_pretrained(FOLDER)` of transformers does.
"""


class RunChat(NamedTuple):
    """How a program must talk with the model of a run, beyond what the model's folder says.

    `template` is the run's own chat template, "" for the model's; `values` are passed to it.
    `generation` is the content of generation_config.json, or None if the model's own is right.
    `stop` are the texts of `sampling.stop`.
    """

    template: str = ""
    values: Mapping[str, JsonValue] = MappingProxyType({})
    generation: Mapping[str, Any] | None = None
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> "RunChat":
        """Returns the settings of a run; raises ConfigError if the template cannot be read."""
        server = config.rollout_server
        text = read_template(server.chat_template) if server.chat_template else ""
        ends = find_reply_ends(config)
        generation = _generation(config.model.path, ends)
        return cls(text, server.chat_template_kwargs, generation, ends.texts)

    def write(self, folder: Path) -> None:
        """Writes all of it into a model's folder, in place of what the model has."""
        if self.template:
            self._write_template(folder)
        if self.generation is not None:
            text = json.dumps(dict(self.generation), indent=2)
            (folder / GENERATION_CONFIG).write_text(text, encoding="utf-8")
        notes = ""
        if self.values:
            notes += _VALUES.format(json.dumps(dict(self.values)))
        if self.stop:
            notes += _TEXTS.format(json.dumps(self.stop, ensure_ascii=False))
        if self.generation is not None and not (folder / "config.json").is_file():
            notes += _ADAPTER_ENDS
        if notes:
            with (folder / "README.md").open("a", encoding="utf-8") as readme:
                readme.write(notes)

    def _write_template(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        (folder / "chat_template.json").unlink(missing_ok=True)
        shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
        for name in ("tokenizer_config.json", "processor_config.json"):
            path = folder / name
            settings = json.loads(path.read_bytes()) if path.is_file() else {}
            if settings.pop("chat_template", None) is not None:
                path.write_text(json.dumps(settings, indent=2))


def _generation(folder: Path, ends: ReplyEnds) -> dict[str, Any] | None:
    """Returns generation_config.json with all ends of replies; None if the folder's has them."""
    path = folder / GENERATION_CONFIG
    if path.is_file():
        table = read_table(path)
    else:
        model = read_model_table(folder)
        table = {name: model[name] for name in _FALLBACK_FIELDS if model.get(name) is not None}
    token_ids = listed_ids(table.get("eos_token_id"))
    missing = [token_id for token_id in ends.token_ids if token_id not in token_ids]
    if not missing:
        return None
    token_ids += missing
    table["eos_token_id"] = token_ids if len(token_ids) > 1 else token_ids[0]
    return table
