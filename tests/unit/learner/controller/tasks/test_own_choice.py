"""Users' classes that choose tasks: what they see, and what their faults do."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from slipstream.core.configuration.config_file import dump_config, parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.curriculum_section import CurriculumSection
from slipstream.core.task_view import TaskView
from slipstream.core.types import GroupId
from slipstream.learner.controller import check
from slipstream.learner.controller.records.task_results import TaskResults
from slipstream.learner.controller.tasks.curriculum import Curriculum
from slipstream.learner.controller.tasks.own_choice import ChoiceFailed, OwnChoice, own_choices

FOLDER = str(Path(__file__).parents[4] / "support" / "fakes")


def settings(name: str, **args: object) -> CurriculumSection:
    table = {"rule": "own", "chooser": f"task_choosers:{name}", "args": args}
    return CurriculumSection.model_validate(table)


def chooser(name: str, **args: object) -> OwnChoice:
    return OwnChoice(settings(name, **args), search_path=FOLDER, limit_s=0.3)


def test_a_class_of_the_user_sees_all_results_and_chooses() -> None:
    made, results = chooser("NearestToHalf", target=0.4), TaskResults()
    curriculum = Curriculum(settings("NearestToHalf"), "1/e", results, made)
    first = []
    for number in range(4):
        first.append(curriculum.draw(4, number))
        curriculum.note(GroupId(f"g{number}"), first[-1], 0.25 * first[-1])
    assert sorted(first) == [0, 1, 2, 3]
    assert curriculum.draw(4, 4) == 2
    curriculum.note(GroupId("g4"), 2, 1.0)
    assert curriculum.draw(4, 5) == 1
    # The same results and number give the same choice, in another process too.
    made = chooser("NearestToHalf", target=0.4)
    again = Curriculum(settings("NearestToHalf"), "1/e", results, made)
    assert [again.draw(4, number) for number in (5, 6)] == [1, 1]


def test_the_numbers_of_a_choice_follow_from_seed_and_number() -> None:
    drawn = [TaskView(9, number, "1/e").random.random() for number in (0, 1, 0)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert TaskView(9, 0, "2/e").random.random() != drawn[0]


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (
            "raise",
            "task_choosers:Odd failed: KeyError: 'no such task' (task_choosers.py:NN in choose)",
        ),
        ("exit", "task_choosers:Odd failed: SystemExit: 3 (task_choosers.py:NN in choose)"),
        (
            "hang",
            "task_choosers:Odd failed: a choice must take at most 0.3 s "
            "(task_choosers.py:NN in choose)",
        ),
        (
            "swallow",
            "task_choosers:Odd failed: a choice must take at most 0.3 s "
            "(task_choosers.py:NN in choose)",
        ),
        (
            "swallow all",
            "task_choosers:Odd failed: a choice must take at most 0.3 s "
            "(task_choosers.py:NN in choose)",
        ),
        (
            "cancelled",
            "task_choosers:Odd failed: CancelledError (task_choosers.py:NN in choose)",
        ),
        (
            "generator exit",
            "task_choosers:Odd failed: GeneratorExit (task_choosers.py:NN in choose)",
        ),
        ("mute error", "task_choosers:Odd failed: MuteError (task_choosers.py:NN in choose)"),
        ("mute", "task_choosers:Odd must choose a task from 0 to 6, got <Mute instance at 0x>"),
        ("huge", "task_choosers:Odd must choose a task from 0 to 6, got an object of type int"),
        (
            "text",
            "task_choosers:Odd must choose a task from 0 to 6, got 'xxxxxxxxxxxx...xxxxxxxxxxxxx'",
        ),
        ("float", "task_choosers:Odd must choose a task from 0 to 6, got 1.0"),
        ("true", "task_choosers:Odd must choose a task from 0 to 6, got True"),
        ("outside", "task_choosers:Odd must choose a task from 0 to 6, got 7"),
        ("below", "task_choosers:Odd must choose a task from 0 to 6, got -1"),
    ],
)
def test_a_class_that_makes_no_choice_is_named_with_its_fault(what: str, cause: str) -> None:
    made = chooser("Odd", what=what)
    with pytest.raises(ChoiceFailed) as caught:
        made.choose(TaskView(7, 0, "s"))
    said = re.sub(r":\d+ in", ":NN in", str(caught.value))
    assert re.sub(r"0x\w+", "0x", said) == cause


def test_a_number_that_cannot_be_compared_is_an_index() -> None:
    assert chooser("Odd", what="number").choose(TaskView(7, 0, "s")) == 0


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Refusing", r"OSError: /data is gone \(task_choosers.py:\d+ in __init__\)"),
        ("NoChoice", "must have a method choose"),
        ("Absent", "AttributeError: module 'task_choosers' has no attribute 'Absent'"),
        ("Odd", "TypeError: .*missing 1 required positional argument: 'what'"),
    ],
)
def test_a_class_that_cannot_be_made_is_refused(name: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=f"^environment e: curriculum.chooser .*{cause}"):
        own_choices({"e": settings(name)}, search_path=FOLDER)


def test_a_module_that_is_not_there_is_refused() -> None:
    section = CurriculumSection.model_validate({"rule": "own", "chooser": "nowhere.at.all:One"})
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'nowhere'"):
        OwnChoice(section, search_path=FOLDER)


def test_only_the_rule_own_has_a_class() -> None:
    for table, cause in (
        ({"rule": "own"}, "rule = 'own' needs chooser, a class as package.module:Class"),
        ({"rule": "skip", "chooser": "m:C"}, "chooser has no effect with rule = 'skip'"),
        ({"rule": "sample", "args": {"a": 1}}, "args has no effect with rule = 'sample'"),
        ({"rule": "own", "chooser": "m:C", "floor": 0.1}, "floor has no effect with rule = 'own'"),
        ({"rule": "own", "chooser": "m.C"}, "a reference is package.module:Class, got 'm.C'"),
    ):
        with pytest.raises(ValidationError, match=cause):
            CurriculumSection.model_validate(table)
    assert own_choices({"e": CurriculumSection(rule="skip")}, search_path=FOLDER) == {}


@pytest.mark.parametrize(
    ("name", "args", "cause"),
    [
        ("NearestToHalf", {}, ""),
        ("Refusing", {}, "environment e: curriculum.chooser task_choosers:Refusing: OSError"),
        ("Odd", {"what": "raise"}, "environment e: task_choosers:Odd failed: KeyError"),
    ],
)
def test_each_class_is_tried_before_a_run(
    name: str, args: dict, cause: str, monkeypatch, capsys
) -> None:
    curriculum = settings(name, **args).model_dump(mode="json", exclude_defaults=True)
    table = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": "nowhere"},
        "algorithm": {"group_size": 4, "groups_per_step": 4, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 64},
        "environments": [{"name": "e", "reference": "m:E", "curriculum": curriculum}],
    }
    text = dump_config(parse_config(table, source="test"))
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    monkeypatch.chdir(FOLDER)
    assert check.main() == (2 if cause else 0)
    assert cause in capsys.readouterr().err
