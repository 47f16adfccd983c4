import itertools
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from slipstream.client.environment import TaskSource
from slipstream.client.environment_loader import load_environment
from slipstream.core.errors import ConfigError, EnvironmentFailed
from slipstream.core.machine.process import open_variables
from support.rigs.completed import python

# Its prompts, scores and generators are compared with the package's own.
pytest.importorskip("cellpylib", reason="pip install reasoning-gym")

from slipstream.environments.frameworks.reasoning_gym import EVALUATING, ReasoningGym  # noqa: E402

REFERENCE = "slipstream.environments.frameworks.reasoning_gym:ReasoningGym"
EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def library() -> ModuleType:
    # The environment imports it where a package that it needs is missing.
    ReasoningGym("chain_sum")
    return sys.modules["reasoning_gym"]


def refusal(*args: object, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        ReasoningGym(*args, **settings)
    return str(caught.value)


def test_questions_and_scores_are_the_packages_own() -> None:
    own = library().create_dataset("countdown", seed=5, size=500)
    environment = ReasoningGym("countdown", seed=5, heldout_one_in=10**9, evaluate_replies=True)
    tasks = list(itertools.islice(environment.tasks(), 3))
    assert [task["question"] for task in tasks] == [own[i]["question"] for i in range(3)]
    system, asked = environment.reset(tasks[0])
    assert system.content == library().utils.SYSTEM_PROMPTS["default"]
    assert asked.content == tasks[0]["question"]
    wrong = environment.step("I guess <answer>1</answer>")
    assert wrong.reward == own.score_answer("1", tasks[0])
    right = environment.step(f"<answer>0</answer> or <answer> {tasks[0]['answer']} </answer>")
    assert right.reward == 1.0
    assert right.metrics == {"countdown": 1.0, "right": 1.0, "answered": 1.0, "scored": 1.0}


@pytest.mark.parametrize(
    ("answer", "reply", "cut"),
    [
        ("tags", "7 <answer>\n8 </answer>", "8"),
        ("tags", "8", None),
        ("whole", " 8 \n", "8"),
        ("last_line", "Let me see:\n 8 \n", "8"),
        ("number", "7 + 1 is 1,008.", "1008"),
        ("number", "eight", None),
        ("number", "<think>So 7", None),
        ("whole", "<think>7?</think> 8 ", "8"),
        ("last_line", "<think>7</think>", None),
    ],
)
def test_what_is_judged_follows_the_named_rule(answer, reply, cut, monkeypatch):
    environment = ReasoningGym("chain_sum", answer=answer)
    asked: list[str | None] = []
    monkeypatch.setattr(
        environment._scorer, "score_answer", lambda answer, entry: asked.append(answer) or 0.5
    )
    environment.reset(TaskSource(environment)[0])
    # Nothing is asked of the package without an answer.
    assert environment.step(reply).reward == (0.5 if cut else 0.0)
    assert asked == ([cut] if cut else [])


def test_several_datasets_come_by_their_weights_with_their_own_scorers() -> None:
    environment = ReasoningGym(
        [{"name": "chain_sum", "weight": 3, "config": EASY}, {"name": "spell_backward"}],
        num_tasks=60,
    )
    names = [task["metadata"]["source_dataset"] for task in environment.tasks()]
    assert 30 < names.count("chain_sum") < 60
    for task in environment.tasks()[:20]:
        environment.reset(task)
        verdict = environment.step(f"<answer>{task['answer']}</answer>")
        assert verdict.metrics[task["metadata"]["source_dataset"]] == 1.0


def test_what_is_held_out_is_never_trained_with_any_seed() -> None:
    def questions(**settings: object) -> set[str]:
        environment = ReasoningGym("chain_sum", EASY, **settings)
        return {task["question"] for task in itertools.islice(environment.tasks(), 400)}

    heldout = questions(split="heldout")
    assert len(heldout) > 5
    assert not heldout & (questions() | questions(seed=1) | questions(seed=77))


def test_num_tasks_are_different_questions() -> None:
    environment = ReasoningGym("chain_sum", EASY, num_tasks=50)
    assert len({task["question"] for task in environment.tasks()}) == 50
    assert refusal("chain_sum", EASY, num_tasks=5000).startswith("num_tasks must be at most ")


# The order of sets of texts, and the process's random numbers, differ between processes.
PROGRAM = """
import itertools, json, random, sys
from slipstream.environments.frameworks.reasoning_gym import ReasoningGym
random.seed(int(sys.argv[1]))
tasks = {
    name: [task["question"] for task in itertools.islice(ReasoningGym(name).tasks(), 20)]
    for name in ("chain_sum", "list_functions", "ransom_note", "word_ladder")
}
print(json.dumps(tasks))
"""


@pytest.mark.process
def test_every_worker_has_the_same_tasks() -> None:
    said = [
        python(
            PROGRAM, seed, env=open_variables(os.environ | {"PYTHONHASHSEED": seed}), check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert json.loads(said[0]) == json.loads(said[1])


def test_a_scorer_that_raises_gives_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    environment = ReasoningGym("chain_sum")
    environment.reset(TaskSource(environment)[0])

    def score_answer(answer: object, entry: object) -> float:
        raise ZeroDivisionError

    environment._scorer.score_answer = score_answer
    verdict = environment.step("<answer>1/0</answer>")
    assert verdict.reward == 0.0
    assert verdict.metrics["scored"] == 0.0
    assert "score_answer failed at '1/0'" in capsys.readouterr().err


def test_what_cannot_work_is_named() -> None:
    assert refusal("chain_sums") == (
        "reasoning-gym has no dataset 'chain_sums'; did you mean 'chain_sum'?"
    )
    assert refusal("chain_sum", {"max_term": 3}) == (
        "dataset chain_sum has no option 'max_term'; did you mean 'max_terms'?"
    )
    assert refusal("chain_sum", {"min_terms": 9}) == (
        "dataset chain_sum: max_terms must be >= min_terms"
    )
    assert "seed is no option of config" in refusal("chain_sum", {"seed": 1})
    assert refusal([{"name": "chain_sum", "wieght": 1}]) == (
        "a dataset has no key 'wieght'; did you mean 'weight'?"
    )
    assert refusal([{"name": "chain_sum", "weight": 0}]).endswith("weight must be above 0, got 0")
    assert refusal([{"weight": 1}]) == (
        "dataset is a name or a list of {name, weight, config}, got {'weight': 1}"
    )
    assert refusal([]) == "dataset must name at least one generator"
    assert "config is for one dataset" in refusal([{"name": "chain_sum"}], EASY)
    assert refusal("chain_sum", answer="tag") == (
        "answer must be one of tags, whole, last_line, number, got 'tag'"
    )
    assert "instruction must contain {question}" in refusal("chain_sum", instruction="Think.")
    assert refusal("chain_sum", split="test") == "split must be one of train, heldout, got 'test'"


# Calls that run a text as Python, with what they run; answers of the package are no replies.
RUNS = re.compile(r"(?<!def )\b(?:eval|exec|parse_expr)\((?!expr|left|right|sub)([^\n]*)")
OWN = ("entry[", 'metadata["integrand"]', "full_code", "problem", "exp.")


def test_scorers_that_run_replies_as_python_must_be_allowed() -> None:
    folder = Path(library().__file__).parent
    running = {
        re.search(r'DATASET_NAME = "(\w+)"', text)[1]
        for path in folder.rglob("*.py")
        if "DATASET_NAME" in (text := path.read_text())
        and any(not ran.startswith(OWN) for ran in RUNS.findall(text.partition("def score_")[2]))
    }
    assert running - EVALUATING == set()
    assert len(EVALUATING & running) == len(EVALUATING)
    assert refusal("countdown") == (
        "the scorer of dataset countdown runs replies as Python code: "
        "evaluate_replies = true allows that"
    )
    assert "spiral_matrix" in refusal([{"name": "chain_sum"}, {"name": "spiral_matrix"}])
    ReasoningGym("countdown", evaluate_replies=True)


def test_a_generator_that_needs_a_compiled_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    monkeypatch.setitem(sys.modules, "pycosat", ModuleType("pycosat"))
    assert refusal("zebra_puzzles") == (
        "dataset zebra_puzzles needs pycosat, which is compiled: pip install pycosat"
    )


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(EnvironmentFailed) as caught:
        load_environment(REFERENCE, json.dumps({"dataset": "chain_sum"}), "")
    assert str(caught.value) == (
        "the package 'reasoning_gym' is missing: pip install reasoning-gym"
    )
