"""Writes docs/configuration.md and docs/settings/ from the settings' models and their comments.

Run `python docs/generate_configuration.py` after each change of a setting.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from slipstream.core.configuration.automatic import completed
from slipstream.core.settings.config import Config
from slipstream.core.settings.function_table import FUNCTIONS, FunctionKind
from slipstream.core.settings.measurement_sections import PlayedSection
from slipstream.core.settings.section import Section
from slipstream.core.settings.sections import QueueUserSection

# Settings that a run of the smallest file chooses by itself, and names.
AUTOMATIC = {
    "run.name",
    "environments.name",
    *completed(
        {
            "run": {"name": "run", "steps": 1, "resume": "never"},
            "model": {"path": "model"},
            "reference": {"parallel": {}},
            "critic": {"learning_rate": 1, "parallel": {}},
        }
    )["automatic"],
}
# Settings that mean the same in another table, by the paths of both tables.
LIKE = {
    "evaluations": ("environments", tuple(PlayedSection.model_fields)),
    "critic": ("learner", ("parallel",)),
    "reference": ("learner", ("parallel",)),
    "reference.teachers": ("reference", ("path", "policy", "parallel", "server")),
    "queue.rollout_server": ("queue.controller", tuple(QueueUserSection.model_fields)),
}
DOCS = Path(__file__).parent
# The pages below docs/settings, each with its title and the sections on it.
PAGES = {
    "run": (
        "Run, model and environments",
        ("run", "model", "sampling", "environments", "evaluations")
        + ("checkpoint", "tracking", "logging"),
    ),
    "learning": (
        "Algorithm and models beside the policy",
        ("algorithm", "reference", "critic", "lora", "drafts"),
    ),
    "processes": (
        "Controller, learner and rollout servers",
        ("controller", "learner", "rollout_server"),
    ),
    "transport": (
        "Queue, weights, security, agents and debugging",
        ("queue", "weights", "security", "agents", "debug"),
    ),
}
# The key of a setting, its values with the default, and its meaning.
Row: typing.TypeAlias = tuple[str, str, str]
LINK = re.compile(r"(?<=\]\()(?!https?:)")
FIELD = re.compile(r"    (\w+): ")
COMMENT = re.compile(r"    # (.*)")

INTRODUCTION = """\
# Configuration

One TOML file describes a run: `slipstream run deploy/configs/quickstart.toml`. A run must say its
model, environment and number of steps, as [smallest.toml](../deploy/configs/smallest.toml) does, or
without a file:

```
slipstream run --model models/tiny --environment slipstream.environments.echo:Echo --steps 5
```

All other settings have defaults.

PAGES

`python docs/generate_configuration.py` writes these pages from the settings' models. In brackets
are the values of a setting and, behind a semicolon, its default.

- An unknown key is refused with the nearest known ones, a wrong value with the rule: one line on
  stderr and exit code 2, before anything is loaded.
- `section.key=value` behind the file replaces a setting. The value is TOML, or else a string.
  Entries of lists are counted from 0:

  ```
  slipstream run deploy/configs/quickstart.toml run.name=second environments.0.weight=2.0
  ```

- A table `[extensions.NAME]` is of [another package](guides/watching.md#trackers).
- `--dry-run` checks the file, the model folder, the installed packages and the controller's port,
  prints all settings and starts nothing. It tries settings that are passed on to Megatron and vLLM
  on their own types. Environments are looked for and not loaded. The exit code is 2 for settings
  that cannot work, and 1 where nothing could start on this machine.
- Numbers are finite, counts at most 2,147,483,647, times 1 ms to 30 years. Texts are one line.
- A run writes its resolved settings to `config.toml` in its folder, readable by its owner only. The
  first line has the digest of the others: remove it when you change the file.
- Times are in seconds (`_s`), sizes in bytes (`_bytes`), mebibytes (`_mib`) or gibibytes (`_gib`).
  Paths are relative to the working directory; none begins with `~` or `$`, which nothing replaces.

## What a run chooses by itself

A default of *automatic* follows from the other settings and the model's `config.json`. A stated
value wins. The first lines of a run and its `config.toml` show what was chosen, and a run that goes
on keeps it, on another machine too. The machine has a part only where one command starts the whole
run on two or more GPUs: [a plan for its GPUs](guides/gpus.md#what-a-run-makes-of-several-gpus) and
[a second server](guides/gpus.md#a-second-server-by-itself). With P parameters and W bytes of
weights:

- `run.name`, a name of `environments`: model's folder and environments; the class in lower case.
- `algorithm.group_size`: 8; 1 where `advantage` is score or none.
- `algorithm.groups_per_step`: 128 episodes a step, 512 if P >= 1e9; a multiple of `mini_batches`.
- `algorithm.max_staleness`, `learner.world_size`, `learner.parallel.tp`, `rollout_server.count`: 2,
  and three times 1, or what the plan for several GPUs says, which may also double or quadruple the
  episodes of a step.
- `algorithm.learning_rate`: 1e-3 if P < 5e7, 1e-6 if P >= 1e9, else 1e-5; adapters: 10 times.
- `algorithm.router_replay`: rollout for a mixture of experts where nothing excludes it.
- `sampling.max_episode_tokens`: 4,096 or what replies need, at most the model's context.
- `sampling.max_reply_tokens`: three quarters of it.
- `learner.micro_batch_tokens`: a rank's share of two episodes, 4,096 to 8,192; one at least. On
  GPUs, which means P >= 1e8 in 16 bits: from 8,192, so many that a layer's work outlasts the start
  of its kernels (32,768 for 0.6 billion parameters, 16,384 for 1.7, 8,192 for 8).
- `learner.offload.gradients` and `optimizer`: true with `controller.turns` sleep.
- `learner.threads`: 4 if P >= 1e9, else 1.
- `learner.timeout_s`: 1,800 if P >= 1e8, else 600.
- `rollout_server.max_episodes`: the episodes of a step, 64 to 256. On GPUs those of `max_staleness`
  + 1 steps, 64 to 512, while `max_reply_tokens`, or half of `max_episode_tokens` if that is less,
  of each fits 70 GB beside the weights.
- `rollout_server.tensor_parallel_size`: 1, 2, 4 or 8: at most 40 GB of weights on a GPU.
- `queue.max_bytes`: the longest episodes of `max_staleness` + 1 steps, 256 MiB at least.
- `weights.bucket_mib`: about W / 32, 64 to 512.
- `weights.bucket_deadline_s`: 10 s for 64 MiB, 2 to 60.
- `weights.join_deadline_s`: 20 s, and 1 s for 10 MB of W; 120 at most.
- `lora.publish`: adapters with `lora.adapters`, else merged.
"""


def pages() -> dict[Path, str]:
    """Returns the text of each page."""
    rows = [
        f"| [{title}](settings/{name}.md) | {', '.join(f'`{section}`' for section in sections)} |"
        for name, (title, sections) in PAGES.items()
    ]
    table = "\n".join(["| page | tables |", "|---|---|", *rows])
    texts = {DOCS / "configuration.md": INTRODUCTION.replace("PAGES\n", f"{table}\n")}
    for name, (title, sections) in PAGES.items():
        lines = [
            f"# {title}\n",
            "[Configuration](configuration.md) says how to read and set these.\n",
        ]
        for section in sections:
            model, is_list = _model(Config.model_fields[section])
            if model is None:
                raise TypeError(f"{section} is no table of settings")
            lines += _section(f"[[{section}]]" if is_list else f"[{section}]", model, section)
        # Links are written as from docs/.
        texts[DOCS / "settings" / f"{name}.md"] = LINK.sub("../", "\n".join(lines))
    return texts


def main() -> None:
    """Writes all pages."""
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def _section(title: str, model: type[BaseModel], path: str) -> Iterator[str]:
    yield f"## `{title}`\n"
    other, alike = LIKE.get(path, ("", ()))
    if len(alike) == len(model.model_fields):
        yield f"All as in `{other}`.\n"
        return
    yield f"{inspect.getdoc(model)}\n"
    if alike:
        yield f"These mean the same as in `{other}`: {', '.join(f'`{name}`' for name in alike)}.\n"
    rows = [f"- {key} ({values}): {meaning}" for key, values, meaning in _rows(model, path, alike)]
    yield "\n".join([*rows, ""])
    for name, field in model.model_fields.items():
        inner, _ = _model(field)
        if inner is not None and name not in alike:
            is_by_name = typing.get_origin(field.annotation) is dict
            title = f"[{path}.{name}{'.NAME' * is_by_name}]"
            yield from _section(title, inner, f"{path}.{name}")
    for kind in FUNCTIONS if path == "algorithm" else ():
        yield from _arguments(kind)


def _arguments(kind: FunctionKind) -> Iterator[str]:
    """The arguments of the built-in functions of a kind, each with those that have it."""
    names: dict[Row, list[str]] = {}
    for function, built_in in FUNCTIONS[kind].items():
        for row in _rows(built_in.arguments, ""):
            names.setdefault(row, []).append(f"`{function}`")
    if names:
        yield f"## `[algorithm.{kind}_args]`\n"
        for (key, values, meaning), functions in names.items():
            yield f"- {key} of {', '.join(functions)} ({values}): {meaning}"
        yield ""


def _rows(model: type[BaseModel], path: str, left_out: Sequence[str] = ()) -> Iterator[Row]:
    """A row for each setting that is no table of its own."""
    comments = _comments(model)
    schema = model.model_json_schema().get("properties", {})
    for name, field in model.model_fields.items():
        if name in left_out or _model(field)[0] is not None:
            continue
        default = "automatic" if f"{path}.{name}" in AUTOMATIC else _default(field)
        values = "; ".join(filter(None, (_values(schema[name]), default)))
        yield f"`{name}`", values, comments.get(name, "")


def _model(field: FieldInfo) -> tuple[type[BaseModel] | None, bool]:
    """The section that a field holds, and whether it holds a list of them."""
    annotation = field.annotation
    if typing.get_origin(annotation) is types.UnionType:
        # A table that may be left out.
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is dict:
        # Tables by the user's names.
        annotation = typing.get_args(annotation)[1]
    is_list = typing.get_origin(annotation) is tuple
    inner = typing.get_args(annotation)[0] if is_list else annotation
    if isinstance(inner, type) and not isinstance(inner, types.GenericAlias):
        return (inner, is_list) if issubclass(inner, BaseModel) else (None, False)
    return None, False


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """The comment above each field."""
    comments: dict[str, str] = {}
    lines: list[str] = []
    sections = [cls for cls in reversed(model.__mro__) if issubclass(cls, Section)]
    sources = (
        inspect.getsource(section)
        for section in sections
        if not section.__name__.startswith("_Set")
    )
    for line in "\n".join(sources).splitlines():
        if comment := COMMENT.match(line):
            lines.append(comment[1])
            continue
        if field := FIELD.match(line):
            comments[field[1]] = " ".join(lines)
        lines = []
    return comments


def _values(schema: dict[str, typing.Any]) -> str:
    """What a value may be, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(_values(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f'`"{value}"`' for value in schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        return f"{len(schema['prefixItems'])} numbers"
    if schema.get("type") == "array":
        return f"list of {_values(schema['items'])}"
    if "$ref" in schema:
        return "table"
    names = {"integer": "integer", "number": "number", "boolean": "boolean"}
    names |= {"string": "string", "object": "table"}
    text = "path" if schema.get("format") == "path" else names[schema["type"]]
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]:.15g}" for key, sign in bounds.items() if key in schema]
    return " ".join([text, ", ".join(limits)]).strip()


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return ""
    value = field.default
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, tuple):
        value = list(value)
    elif not isinstance(value, int | float | dict):
        value = f'"{value}"'
    return f"`{value}`"


if __name__ == "__main__":
    main()
