"""Shows what environments would teach, for `slipstream check`: rewards of known replies, prompts.

Each environment is played in a worker process; a program with the model's chat template then writes
the prompts of the tasks that were played.
"""

import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TypedDict

from pydantic import JsonValue
from slipstream.client.audit_data import shared_questions
from slipstream.client.launch import preflight
from slipstream.client.terminal import complain, counted, plain, say
from slipstream.core.errors import USAGE_ERROR, WARNING, ConfigError
from slipstream.core.machine.other_python import worker_program
from slipstream.core.models.model_sizes import read_model_table
from slipstream.core.settings.config import Config
from slipstream.core.template_values import values_json

# Seconds in which replies are played to an environment.
PLAYED_S = 18.0


class Report(TypedDict):
    """What a worker says of one environment."""

    # The headline first.
    lines: list[str]
    refused: list[str]
    seconds: float
    # The first observation of each task that was played, serialized, in base64.
    openings: list[str]
    # The question of each task, in one form of letters and spaces, and its right answer.
    asked: list[tuple[str, str]]


class Prompt(TypedDict):
    """What the chat template makes of an opening."""

    tokens: int
    # Why it cannot be written, such as a message that the template leaves out.
    fault: str
    # Warnings about the prompt, such as "offer tools, but ...".
    told: list[str]


async def audit_class(
    reference: str, options: Sequence[str], *, python: str, timeout_s: float, model: Path | None
) -> int:
    """Audits one class with further `options` of the worker; returns the exit code."""
    preflight.check_python(reference, Path(python) if python else None)
    if model is not None:
        read_model_table(model)
    command = [*worker_program(python), "--check", reference, "--search-path", os.getcwd()]
    command += ["--timeout-s", str(timeout_s), *options]
    report = await _played(reference, command, timeout_s=timeout_s)
    if report is None:
        return USAGE_ERROR
    (prompts,) = [[]] if model is None else await _written([(report, "")], model)
    return _show(reference, report, prompts, 0)


async def audit_all(config: Config) -> int:
    """Audits all environments and evaluations of the settings; returns the exit code."""
    sampling = config.sampling
    server = config.rollout_server
    max_tokens = sampling.max_prompt_tokens or sampling.max_episode_tokens - 1
    code = 0
    seen = []
    for section in config.played:
        preflight.check_python(section.name, section.python)
        command = preflight.audit_command(section, config)
        report = await _played(section.name, command, timeout_s=section.timeout_s)
        if report is None:
            code = USAGE_ERROR
        else:
            seen.append((section, report))
    reports = [(report, values_json(section.chat_template_kwargs)) for section, report in seen]
    prompts = await _written(
        reports,
        config.model.path,
        template=server.chat_template,
        values=server.chat_template_kwargs,
    )
    if line := await preflight.reply_ends_line(config):
        say(line)
    for (section, report), written in zip(seen, prompts, strict=True):
        code = _show(section.name, report, written, max_tokens) or code
    for measured, measured_report in seen:
        for section, report in seen:
            if measured not in config.evaluations or section not in config.environments:
                continue
            number, shared = shared_questions(measured_report["asked"], report["asked"])
            if shared:
                of = f"{shared} of {counted(number, 'task')} of {measured.name}"
                say(f"! {of} that were looked at are trained on too, in {section.name}")
    return code


async def _played(name: str, command: Sequence[str], *, timeout_s: float) -> Report | None:
    """Returns the worker's report, or None after showing why there is none."""
    with preflight.told_when_slow(f"{name} is audited, each call within {timeout_s:g} s"):
        command = [*command, "--json", "--seconds", str(PLAYED_S)]
        ended = await preflight.run_check(command, timeout_s=timeout_s, played_s=PLAYED_S)
    is_late = ended.code is None
    for line in ended.lines[: len(ended.lines) - is_late]:
        print(plain(line.removeprefix(WARNING)), file=sys.stderr)
    if is_late:
        complain(f"{name}: {ended.lines[-1]}")
    if ended.code != 0:
        return None
    report: Report | None = json.loads(ended.output) if ended.output else None
    return report


async def _written(
    reports: Sequence[tuple[Report, str]],
    model: Path,
    *,
    template: Path | None = None,
    values: Mapping[str, JsonValue] = {},
) -> list[list[Prompt]]:
    """Returns what the template makes of each report's openings, nothing without a tokenizer."""
    nothing: list[list[Prompt]] = [[] for _ in reports]
    if not any(report["openings"] for report, _ in reports):
        return nothing
    if importlib.util.find_spec("transformers") is None:
        say("prompts are not written: transformers is not installed here")
        return nothing
    question = {
        "model": str(model),
        "template": template and str(template),
        "values": dict(values),
        "environments": [
            {"openings": report["openings"], "values": template_values}
            for report, template_values in reports
        ],
    }
    ended = await preflight.run_program(
        [sys.executable, "-m", preflight.ENGINE_CHECK, "prompts"],
        limit_s=preflight.SETTINGS_LIMIT_S,
        given=json.dumps(question).encode(),
    )
    if ended.code != 0:
        cause = (ended.lines or (f"no answer within {preflight.SETTINGS_LIMIT_S:g} s",))[-1]
        raise ConfigError(f"prompts cannot be written: {cause}")
    answers: list[list[Prompt]] = json.loads(ended.output)
    return answers


def _show(name: str, report: Report, prompts: Sequence[Prompt], max_tokens: int) -> int:
    title, *lines = report["lines"]
    say(f"{name}: {title}, in {report['seconds']:.1f} s")
    faults = [prompt["fault"] for prompt in prompts if prompt["fault"]]
    counts = [prompt["tokens"] for prompt in prompts if not prompt["fault"]]
    if counts:
        tokens = f"least {min(counts):,}, median {median(counts):,.0f}, most {max(counts):,}"
        lines.append(
            f"tokens of a prompt: {tokens}{f' of at most {max_tokens:,}' if max_tokens else ''}"
        )
    of = f"of {counted(len(prompts), 'prompt')}"
    if faults:
        lines.append(f"! {len(faults)} {of} cannot be written: {faults[0]}")
    remarks = Counter(chain.from_iterable(prompt["told"] for prompt in prompts))
    lines += [f"! {number} {of} {what}" for what, number in remarks.items()]
    longer = sum(count > max_tokens for count in counts) if max_tokens else 0
    refused = report["refused"]
    if longer:
        lines.append(
            f"! {longer} {of} have more than {max_tokens:,} tokens: their tasks are set aside"
        )
    for line in lines:
        say(f"  {line}")
    if longer == len(prompts) > 0:
        refused = [*refused, f"none {of} fits: all have more than {max_tokens:,} tokens"]
    if 2 * len(faults) >= max(len(prompts), 1):
        refused = [*refused, f"most prompts cannot be written: {faults[0]}"]
    for cause in refused:
        complain(f"{name}: {cause}")
    if not refused:
        say("  ready")
    return USAGE_ERROR if refused else 0
