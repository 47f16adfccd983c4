"""What README.md and docs/ say about commands, settings and files is true."""

import argparse
import ast
import fnmatch
import functools
import inspect
import itertools
import json
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import generate_configuration
import generate_contract
import generate_migration
import generate_models
import pytest
import slipstream.environments.sandbox
import tinker_line_up
from slipstream.client import Environment, Reply, ResetResult, StepResult, ToolCall
from slipstream.client.cli import _parser, parse
from slipstream.client.environment import TaskSource
from slipstream.client.environment_loader import load_environment
from slipstream.core.configuration.config_file import load_config, parse_config
from slipstream.core.configuration.foreign_names import COMMON, foreign_names
from slipstream.core.machine.other_python import NEEDS
from slipstream.core.models.families import FAMILIES
from slipstream.core.models.model_rules import adapter_problems
from slipstream.core.models.model_sizes import ModelSizes
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import LoraSection
from slipstream.environments.command import Command
from slipstream.environments.demonstrations import Demonstrations
from slipstream.environments.frameworks.verifiers import Verifiers
from slipstream.environments.judge import CallLimits, Judge, Judged, Rewarded
from slipstream.environments.questions import Questions
from support.rigs.completed import completed
from support.rigs.setting_names import setting_exists

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for place in ("*.md", "docs/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(place)
)

FENCE = re.compile(r"^ *```([\w{}-]*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INLINE_COMMAND = re.compile(r"`slipstream ([a-z][\w-]*)")
# A synopsis has parts that may be left out, and describes the command to its right.
OPTIONAL = re.compile(r" \[[^\]]*\]")
DESCRIPTION = re.compile(r"(?<=\S) {2,}\S.*")

# The reader's own, and what must not be there.
NOT_OURS = {
    "my_environments.py",
    "my_agents.py",
    "my_functions.py",
    "my_judges.py",
    "trl_judge.py",
    "verl_judge.py",
    "serve_agents.py",
    "solve.py",
    "replies.py",
    "chat.py",
    "reverse_v1.py",
    "sums.py",
    "slipstream/__init__.py",
}

for_all_pages = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in FENCE.findall(page.read_text()):
        if language in languages:
            yield text


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `slipstream` command line in a code block."""
    for text in blocks(page, "", "sh", "bash", "console"):
        for line in text.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if line.startswith("slipstream "):
                if "'" not in line:
                    line = OPTIONAL.sub("", DESCRIPTION.sub("", line))
                yield shlex.split(line, comments=True)[1:]


def python_commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `python` command line in a code block that names a program of ours."""
    for text in blocks(page, "", "sh", "bash", "console"):
        for line in text.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            line = line.removeprefix("PYTHONPATH=tests ")
            if line.startswith("python "):
                program = shlex.split(line, comments=True)[1:]
                ours = program[0] not in {"-", *NOT_OURS}
                if ours and program[:2] != ["-m", "pytest"]:
                    yield program


@functools.cache
def parser() -> argparse.ArgumentParser:
    """The command line's parser: hundreds of commands are read by the same one."""
    return _parser()


def known_commands() -> set[str]:
    return next(
        set(action.choices)
        for action in parser()._actions
        if isinstance(action.choices, dict)
    )


def is_taken(arguments: list[str]) -> bool:
    """Whether the real parser takes a command; a list of commands if it knows all of them."""
    if "|" in arguments:
        return set(arguments) - {"|"} <= known_commands()
    try:
        parse(arguments)
    except SystemExit as exit_:
        return exit_.code == 0
    return True


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


def test_the_configuration_page_is_what_the_models_say():
    pages = generate_configuration.pages()
    assert {path: path.read_text() for path in pages} == pages
    assert {*(ROOT / "docs" / "settings").iterdir()} < {*pages}
    page_names = [
        section
        for _, sections in generate_configuration.PAGES.values()
        for section in sections
    ]
    # Other packages say what their tables mean.
    other_sections = {"automatic", "sources", "extensions"}
    assert sorted(page_names) == sorted({*Config.model_fields} - other_sections)


def test_the_page_of_models_is_what_their_records_say():
    text = (ROOT / "docs" / "guides" / "models.md").read_text()
    assert generate_models.page(text) == text


def test_every_model_of_tinkers_line_up_has_a_known_class_or_a_cause():
    entries = tinker_line_up.LINE_UP
    names = [name for entry in entries for name in entry.names]
    assert len(names) == len(set(names)) == 46
    for entry in entries:
        assert bool(entry.architecture) != bool(entry.cause), entry.names
        assert not entry.architecture or entry.architecture in FAMILIES, entry.names


@pytest.mark.parametrize(
    "name", [entry.architecture for entry in tinker_line_up.LINE_UP]
)
def test_the_line_up_says_of_adapters_what_the_rules_allow(name):
    if not name:
        return
    family = FAMILIES[name]
    said = tinker_line_up.adapters(family)
    table = {
        "architectures": [name],
        "n_routed_experts": 4 * (family.experts is not None),
    }
    table["kv_lora_rank"] = 8 * ("kv_lora_rank" in family.read)
    sizes = ModelSizes.of(table)
    attention = ("linear_qkv", "linear_proj")

    def allows(**section):
        return not list(adapter_problems(LoraSection(rank=8, **section), sizes, tp=1))

    assert allows(target_modules=attention)
    assert allows() == ("all but experts" not in said)
    assert allows(target_modules=attention, publish="adapters") == (
        ", merged" not in said
    )
    has_experts_apart = allows(publish="adapters")
    assert has_experts_apart == (said == "all")


def test_the_page_of_tinkers_contract_is_what_the_server_reads():
    assert generate_contract.PAGE.read_text() == generate_contract.page()


def test_the_api_page_has_all_that_users_import():
    page = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^\.\. auto\w+:: (?:[\w.]*\.)?(\w+)$", page, re.MULTILINE))
    assert {
        *slipstream.client.__all__,
        *slipstream.environments.sandbox.__all__,
        "Judge",
    } <= shown


def test_no_setting_is_without_a_meaning():
    pages = generate_configuration.pages().items()
    lines = [
        line
        for path, text in pages
        if path.parent.name == "settings"
        for line in text.split("\n")
    ]
    settings = [line for line in lines if line.startswith("- ")]
    assert len(settings) > 150
    assert [line for line in settings if not re.search(r"\): \S", line)] == []


@for_all_pages
def test_every_link_leads_somewhere(page: Path):
    text = FENCE.sub("", page.read_text())
    for target in LINK.findall(text):
        # The latter are GitHub's own, below the address of the repository.
        if "://" in target or target.startswith(
            ("../../actions/", "../../raw/badges/")
        ):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        assert found.exists(), target
        assert not anchor or anchor in headings(found), target


@for_all_pages
def test_every_row_belongs_to_a_table_with_as_many_columns(page: Path):
    lines = FENCE.sub("", page.read_text()).splitlines()
    for is_table, rows in itertools.groupby(lines, lambda line: line.startswith("|")):
        if not is_table:
            continue
        _, rule, *_ = table = list(rows) + [""]
        assert re.fullmatch(r"(\|[ :]*-+[ :]*)+\|", rule), table[0]
        widths = {
            len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row)))
            for row in table[:-1]
        }
        assert len(widths) == 1, table[0]


OUR_FOLDERS = (
    "protos",
    "core",
    "client",
    "environments",
    "rollout_server",
    "learner",
    "extensions",
    "deploy",
    "tests",
    "benchmarks",
    "docs",
)
INLINE_FILE = re.compile(r"`((?:\.\./)?[\w/*]+\.py)`")


def test_every_file_of_ours_that_is_named_exists() -> None:
    ours = [
        f"/{path.relative_to(ROOT)}"
        for name in OUR_FOLDERS
        for path in (ROOT / name).rglob("*.py")
    ]
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            # The changelog names files as they were.
            continue
        for name in (
            set(INLINE_FILE.findall(FENCE.sub("", page.read_text()))) - NOT_OURS
        ):
            file = name.removeprefix("../")
            assert any(fnmatch.fnmatch(path, f"*/{file}") for path in ours), (
                f"{page.name}: {name}"
            )


def test_nothing_installs_our_name_which_no_package_index_has() -> None:
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    roots = ("protos", "client", "rollout_server", "learner", "deploy")
    files = [*PAGES, *(path for root in roots for path in (ROOT / root).rglob("*.py"))]
    assert not [path for path in files if re.search(rf"\b{name}\[", path.read_text())]


@for_all_pages
def test_the_command_line_takes_every_command(page: Path):
    for arguments in commands(page):
        assert is_taken(arguments), shlex.join(arguments)


BUILT_IN = {
    "questions": (Questions,),
    "judges": (Judged, Rewarded, Judge),
    "demonstrations": (Demonstrations,),
    "agents": (Command,),
    "frameworks": (Verifiers,),
}


@pytest.mark.parametrize("page", BUILT_IN)
def test_the_guides_name_every_argument_of_what_is_built_in(page: str) -> None:
    text = (ROOT / "docs" / "guides" / f"{page}.md").read_text()
    parameters = [
        inspect.signature(kind).parameters.values() for kind in BUILT_IN[page]
    ]
    names = {
        parameter.name
        for part in parameters
        for parameter in part
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    names |= {*CallLimits.__annotations__} if page == "judges" else set()
    # A file names `api_key_file` in place of a key.
    names -= {"api_key"}
    assert names
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()


def test_what_installs_packages_for_another_python_names_all_of_them() -> None:
    lines = [
        line
        for page in PAGES
        for text in blocks(page, "")
        for line in text.splitlines()
        if "pip install" in line and "grpcio" in line
    ]
    assert len(lines) >= 2
    assert [
        line for line in lines if not {*NEEDS.values()} <= {*shlex.split(line)}
    ] == []


@pytest.mark.process
def test_our_programs_take_every_command() -> None:
    commands = [command for page in PAGES for command in python_commands(page)]
    assert len(commands) > 20
    folders = (ROOT, ROOT / "tests", ROOT / "deploy")
    process = completed(
        [sys.executable, str(ROOT / "tests" / "support" / "rigs" / "only_parse.py")],
        input=json.dumps(commands),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
    )
    parsed = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(parsed) == len(commands), process.stderr
    assert [
        f"{shlex.join(c)}: {s}" for c, s in zip(commands, parsed, strict=True) if s
    ] == []


@for_all_pages
def test_every_command_that_is_named_exists(page: Path):
    assert set(INLINE_COMMAND.findall(page.read_text())) <= known_commands()


@for_all_pages
def test_every_command_has_settings_that_exist(page: Path):
    for arguments in commands(page):
        if len(arguments) > 1 and arguments[1].startswith("deploy/"):
            overrides = [a for a in arguments[2:] if re.match(r"[a-z_]+\.[\w.]+=", a)]
            load_config(ROOT / arguments[1], overrides)


def test_every_setting_that_the_page_on_migration_names_exists():
    page = (ROOT / "docs" / "guides" / "migration.md").read_text()
    rows = re.findall(r"^\|.*\|$", page, re.MULTILINE)
    ours = [row.replace("\\|", "").split("|")[2] for row in rows]
    names = [
        n for cell in ours for n in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)[ `]", cell)
    ]
    settings = [name for name in names if name.split(".")[0] in Config.model_fields]
    assert len(settings) > 600
    assert [name for name in settings if not setting_exists(name)] == []


def test_the_page_on_migration_has_every_name_that_an_error_explains() -> None:
    page = (ROOT / "docs" / "guides" / "migration.md").read_text()
    assert generate_migration.written(page) == page, (
        "run python docs/generate_migration.py"
    )
    trainers = {row.trainer for row in foreign_names()} - {COMMON}
    assert set(generate_migration.trainers(page)) == trainers


# The keys of these tables are Megatron's and vLLM's to name.
PASSED_ON = (
    "learner.ddp",
    "learner.optimizer",
    "learner.transformer",
    "rollout_server.engine",
)
INLINE_SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:`| ?=)")


# The page on migration has settings of other projects too, the test above looks at ours.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "migration.md"],
    ids=lambda page: page.name,
)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    matches = set(INLINE_SETTING.findall(FENCE.sub("", page.read_text())))
    settings = {
        name
        for name in matches
        if name.split(".")[0] in Config.model_fields
        and name.split(".")[-1] not in ("py", "json", "md", "toml", "yaml")
        and not name.startswith(PASSED_ON)
    }
    assert {name for name in settings if not setting_exists(name)} == set()


@for_all_pages
def test_every_toml_block_fits_into_a_run(page: Path):
    quickstart = tomllib.loads(
        (ROOT / "deploy" / "configs" / "quickstart.toml").read_text()
    )
    for text in blocks(page, "toml"):
        parse_config(quickstart | tomllib.loads(text), source=page.name)


@for_all_pages
def test_every_python_block_can_be_parsed(page: Path):
    for text in blocks(page, "python"):
        ast.parse(text, page.name)


def test_the_tests_that_the_page_on_security_names_exist():
    page = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| .* \| .* \| (.*test_.*) \|$", page, re.MULTILINE)
    assert len(rows) >= 15
    for file, names in re.findall(
        r"`([\w/]+\.py)`(?:: ((?:`test_\w+`(?:, )?)+))?", "\n".join(rows)
    ):
        text = (ROOT / "tests" / file).read_text()
        for name in re.findall(r"`(test_\w+)`", names):
            assert f"def {name}(" in text, f"{file}: {name}"


# Functions as verl and TRL have them, for the wrappers on the page.
THEIRS = {
    "my_reward": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = data_source == "sums" and solution_str == ground_truth
    return right * extra_info["weight"]
""",
    "my_rewards": """
def accuracy_reward(completions, solution, **kwargs):
    said = [completion[0]["content"] for completion in completions]
    return [float(one == other) for one, other in zip(said, solution, strict=True)]

def format_reward(prompts, completions, **kwargs):
    return [float(prompt[-1]["content"] == "2 + 2?") for prompt in prompts]
""",
}
ASKED = [{"role": "user", "content": "2 + 2?"}]
VERL = {
    "data_source": "sums",
    "prompt": ASKED,
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"weight": 2.0},
}


async def test_the_reward_function_that_is_shown_judges(tmp_path: Path) -> None:
    page = ROOT / "docs" / "guides" / "questions.md"
    (text,) = (
        block for block in blocks(page, "python") if "def short_and_right" in block
    )
    (tmp_path / "my_judges.py").write_text(text)
    (tmp_path / "data.jsonl").write_text(
        json.dumps({"question": "2 + 2?", "answer": "4"})
    )
    args = {"path": str(tmp_path / "data.jsonl"), "judge": "my_judges:short_and_right"}
    reference = "slipstream.environments.questions:Questions"
    environment = load_environment(reference, json.dumps(args), str(tmp_path))
    environment.reset(environment.tasks()[0])
    result = await environment.step(Reply("It is 4."))
    assert (result.reward, result.metrics) == (pytest.approx(0.992), {"right": True})


async def test_reward_functions_of_verl_and_trl_judge_as_the_page_wraps_them(
    tmp_path, monkeypatch
):
    pyarrow = pytest.importorskip("pyarrow")
    files = pytest.importorskip("pyarrow.parquet")
    page = ROOT / "docs" / "guides" / "migration.md"
    verl, trl = (text for text in blocks(page, "python") if "def judge" in text)
    for name, text in {"verl_judge": verl, "trl_judge": trl, **THEIRS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    files.write_table(pyarrow.Table.from_pylist([VERL]), tmp_path / "train.parquet")
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"prompt": ASKED, "solution": "4"})
    )
    monkeypatch.chdir(tmp_path)
    tables = [
        tomllib.loads(text)["environments"][0]
        for text in blocks(page, "toml")
        if "judge" in text
    ]
    rewards = {}
    for table in tables:
        environment = load_environment(
            table["reference"], json.dumps(table["args"]), str(tmp_path)
        )
        for reply in ("4", "5"):
            environment.reset(environment.tasks()[0])
            result = await environment.step(Reply(reply))
            rewards[table["name"], reply] = result.reward
    assert rewards == {
        ("verl", "4"): 2.0,
        ("verl", "5"): 0.0,
        ("trl", "4"): 1.5,
        ("trl", "5"): 0.5,
    }


ENVIRONMENT_BLOCKS = [
    text
    for page in PAGES
    for text in blocks(page, "python")
    if "(Environment)" in text and "def tasks" in text and "..." not in text
]
# Arguments of the classes that need some.
TEMPERATURES = {"temperatures": {"Rome": 21.5, "Oslo": 4.0}}
ARGUMENTS = {"WarmerTown": TEMPERATURES}


@pytest.mark.parametrize(
    "text", ENVIRONMENT_BLOCKS, ids=lambda text: text.split("class ")[1][:8]
)
async def test_every_environment_that_is_shown_can_be_used(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "shown.py").write_text(text)
    names = runpy.run_path(str(tmp_path / "shown.py"))
    (page,) = [
        value
        for value in names.values()
        if isinstance(value, type)
        and issubclass(value, Environment)
        and value is not Environment
    ]
    environment = page(**ARGUMENTS.get(page.__name__, {}))
    for index in range(3):
        opened = environment.reset(TaskSource(environment)[index])
        opening = await opened if inspect.isawaitable(opened) else opened
        has_tools = isinstance(opening, ResetResult)
        messages = opening.messages if has_tools else opening
        assert {message["role"] for message in messages} <= {"system", "user"}
    if page.__name__ == "Poem":
        # The judge of this environment is not there.
        return
    calls = [ToolCall("1", "temperature", {"town": "Rome"})] if has_tools else []
    judged = environment.step(Reply("<look>Rome</look>", tool_calls=calls))
    verdict = await judged if inspect.isawaitable(judged) else judged
    assert isinstance(verdict, StepResult)
    assert verdict.done is (page.__name__ not in ARGUMENTS)


def options() -> dict[str, set[str]]:
    """The options of each command; those of argparse's own are left out."""
    choices = next(
        action.choices
        for action in parser()._actions
        if isinstance(action.choices, dict)
    )
    return {
        name: {
            o for a in command._actions for o in a.option_strings if o.startswith("--")
        }
        - {"--help"}
        for name, command in choices.items()
    }


def test_the_page_of_commands_has_all_of_them_with_their_options() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    named = set(re.findall(r"`[^`]*?(--[a-z][a-z-]+)", page)) | set(
        re.findall(r"(--[a-z][a-z-]+) ", page)
    )
    assert {name for name in options() if f"`slipstream {name}" not in page} == set()
    assert set().union(*options().values()) - named == set()
    assert named - set().union(*options().values()) == {"--help", "--version"}


def test_the_page_of_errors_has_all_of_them() -> None:
    tree = ast.parse((ROOT / "core/slipstream/core/errors.py").read_text())
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    page = (ROOT / "docs" / "errors.md").read_text()
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == classes
