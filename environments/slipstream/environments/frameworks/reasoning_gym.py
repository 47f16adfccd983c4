"""Tasks of reasoning-gym: more than a hundred generators of questions with an exact check."""

import contextlib
import dataclasses
import importlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypeAlias

from slipstream.client.environment import Environment, Message, StepResult, answer_of
from slipstream.core.errors import ConfigError
from slipstream.environments.answers import numbers
from slipstream.environments.arguments import Split, check_at_least, check_choice, check_holds
from slipstream.environments.frameworks.packages import import_package, unknown_name

# Number of questions in one data set of the package; the next data set has another seed.
CHUNK = 500
# Number of questions in a row outside the split, or already drawn, after which drawing ends.
MAX_IN_A_ROW = 2000
# Most characters of a metric's name.
MAX_NAME = 40
# The only generator that needs pycosat, which pip compiles.
NEEDS_PYCOSAT = "zebra_puzzles"
# Generators whose scorers run a reply as Python: by eval(), or sympy's parse_expr(), which does it.
EVALUATING = frozenset(
    {
        *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "puzzle24"),
        *("polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion"),
    }
)

Entry: TypeAlias = Mapping[str, Any]
Spec: TypeAlias = Mapping[str, Any]
# A ProceduralDataset of the package.
Generator: TypeAlias = Any


class ReasoningGym(Environment[Entry]):
    """Asks the questions of one generator, or of several with weights; one reply each.

    The reward is the result of the package's own `score_answer`. A hash of the text holds out one
    in `heldout_one_in` questions, whatever the seed is. `answer` says which part of a reply is
    judged: the text between the last <answer> and </answer> ("tags"), the whole reply ("whole"),
    its last line ("last_line") or its last number ("number"). White space around this part does not
    count.
    """

    def __init__(
        self,
        dataset: str | Sequence[Spec],
        config: Mapping[str, Any] | None = None,
        *,
        split: Literal["train", "heldout"] = "train",
        heldout_one_in: int = 10,
        num_tasks: int | None = None,
        seed: int = 0,
        answer: Literal["tags", "whole", "last_line", "number"] = "tags",
        system: str | None = None,
        instruction: str = "{question}",
        evaluate_replies: bool = False,
    ) -> None:
        """`dataset` is a name, with options in `config`, or a list of `{name, weight, config}`.

        `num_tasks` is the number of different questions, None for an endless iterator. `system` is
        a text, or the name of one of the package's prompts; by default it is "default" if answers
        are in tags, otherwise none. `evaluate_replies` allows scorers that run a reply as Python.
        Raises ConfigError, which names the argument that cannot work.
        """
        self._split = Split(split, heldout_one_in)
        check_at_least("num_tasks", num_tasks, 1)
        check_holds("instruction", instruction, "{question}")
        try:
            importlib.import_module("pycosat")
        except ModuleNotFoundError:
            # Then only the generator that needs pycosat is missing.
            sys.modules["pycosat"] = ModuleType("pycosat")
        self._library = import_package("reasoning_gym", install="reasoning-gym")
        importlib.import_module("reasoning_gym.composite")
        self._specs = _read_specs(dataset, config, self._library)
        evaluating = sorted({spec["name"] for spec in self._specs} & EVALUATING)
        if evaluating and not evaluate_replies:
            raise ConfigError(
                f"the scorer of dataset {evaluating[0]} runs replies as Python code: "
                "evaluate_replies = true allows that"
            )
        self._seed = seed
        self._cut, self._in_tags = _cut_of(answer, self._library), answer == "tags"
        if system is None:
            system = "default" if answer == "tags" else ""
        self._system = self._library.utils.SYSTEM_PROMPTS.get(system, system)
        self._instruction = instruction
        self._scorer = self._make(0)
        # The first question shows whether the generator works and the split has questions.
        self._entry = next(self._draw())
        self._tasks = None if num_tasks is None else self._draw_different(num_tasks)

    def tasks(self) -> list[Entry] | Iterator[Entry]:
        """Returns `num_tasks` different questions, or an endless iterator if that is None."""
        return self._draw() if self._tasks is None else self._tasks

    def reset(self, task: Entry) -> list[Message]:
        """Returns the prompt with the question."""
        self._entry, self.expected_answer = task, str(task.get("answer") or "")
        self.right_reply = self.expected_answer
        if self.expected_answer and self._in_tags:
            self.right_reply = f"<answer>{self.expected_answer}</answer>"
        asked = self._instruction.replace("{question}", task["question"])
        system = [Message("system", self._system)] if self._system else []
        return [*system, Message("user", asked)]

    def step(self, reply: str) -> StepResult:
        """Returns the package's score of the reply's answer as the reward.

        If there is no answer or the package's scorer fails, the reward is 0.
        """
        answer = self._cut(answer_of(reply))
        try:
            score = float(self._scorer.score_answer(answer, self._entry)) if answer else 0.0
            is_scored = True
        except Exception as error:  # noqa: BLE001
            # Scorers parse a model's text; an answer at which they raise an error is not right.
            print(f"score_answer failed at {answer!r}: {error!r}", file=sys.stderr)
            score, is_scored = 0.0, False
        name = str(self._entry["metadata"].get("source_dataset", self._specs[0]["name"]))
        metrics = {
            "right": float(score == 1.0),
            "answered": float(bool(answer)),
            "scored": float(is_scored),
        }
        return StepResult(score, metrics={name[:MAX_NAME]: score} | metrics)

    def _make(self, seed: int) -> Generator:
        """Creates a data set of the package.

        Raises ConfigError with the package's own error if its configuration is invalid.
        """
        try:
            if len(self._specs) == 1:
                (spec,) = self._specs
                return self._library.create_dataset(
                    spec["name"], seed=seed, size=CHUNK, **spec["config"]
                )
            made = [self._library.composite.DatasetSpec(**spec) for spec in self._specs]
            return self._library.create_dataset("composite", seed=seed, size=CHUNK, datasets=made)
        except (AssertionError, ValueError, TypeError) as error:
            names = ", ".join(spec["name"] for spec in self._specs)
            raise ConfigError(f"dataset {names}: {error}") from error

    def _draw(self) -> Iterator[Entry]:
        num_outside = 0
        for chunk in itertools.count():
            made = self._make(self._seed + chunk * CHUNK)
            # Some generators draw from the process's random numbers.
            chance = Chance(self._seed + chunk)
            for index in range(CHUNK):
                with chance.in_use():
                    entry: Entry = made[index]
                if self._split.has(entry["question"]):
                    num_outside = 0
                    yield entry
                    continue
                num_outside += 1
                if num_outside >= MAX_IN_A_ROW:
                    raise ConfigError(
                        f"dataset {self._specs[0]['name']}: none of {MAX_IN_A_ROW} questions in a "
                        f"row is in split {self._split.name!r}"
                    )

    def _draw_different(self, num_tasks: int) -> list[Entry]:
        found: dict[str, Entry] = {}
        num_known = 0
        for entry in self._draw():
            num_before = len(found)
            found.setdefault(entry["question"], entry)
            num_known = 0 if len(found) > num_before else num_known + 1
            if len(found) == num_tasks or num_known >= MAX_IN_A_ROW:
                break
        if len(found) < num_tasks:
            raise ConfigError(f"num_tasks must be at most {len(found)} here, got {num_tasks}")
        return list(found.values())


class Chance:
    """A random state of `random` and numpy that is used only within `with chance.in_use()`.

    Each use continues where the last one stopped. Frameworks draw from the process's global
    generators, which all episodes share.
    """

    def __init__(self, seed: int) -> None:
        import numpy

        self._python = random.Random(seed).getstate()
        self._numpy = numpy.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Replaces the process's global random state within the block."""
        import numpy

        python_outside, numpy_outside = random.getstate(), numpy.random.get_state()
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), numpy.random.get_state()
            random.setstate(python_outside)
            numpy.random.set_state(numpy_outside)


def _read_specs(
    dataset: str | Sequence[Spec], config: Mapping[str, Any] | None, library: ModuleType
) -> list[dict[str, Any]]:
    """Returns name, weight and config of each generator.

    Raises ConfigError for an unknown name or option, and for a weight that is not above 0.
    """
    if isinstance(dataset, str):
        given: list[Spec] = [{"name": dataset, "config": config or {}}]
    elif config is not None:
        raise ConfigError("config is for one dataset; in a list each has a config of its own")
    else:
        given = list(dataset)
    specs = []
    for one in given:
        if not isinstance(one, Mapping) or "name" not in one:
            raise ConfigError(f"dataset is a name or a list of {{name, weight, config}}, got {one}")
        if unknown := one.keys() - {"name", "weight", "config"}:
            raise unknown_name("a dataset has no key", min(unknown), ("name", "weight", "config"))
        spec: dict[str, Any] = {"weight": 1.0, "config": {}} | dict(one)
        if not spec["weight"] > 0:
            raise ConfigError(f"dataset {one['name']}: weight must be above 0, got {one['weight']}")
        _check_options(spec["name"], spec["config"], library)
        specs.append(spec)
    if not specs:
        raise ConfigError("dataset must name at least one generator")
    return specs


def _check_options(name: str, config: Mapping[str, Any], library: ModuleType) -> None:
    known = library.factory.DATASETS
    if name not in known or name == "composite":
        raise unknown_name("reasoning-gym has no dataset", name, known.keys() - {"composite"})
    if name == NEEDS_PYCOSAT and not hasattr(sys.modules["pycosat"], "itersolve"):
        raise ConfigError(f"dataset {name} needs pycosat, which is compiled: pip install pycosat")
    options = {field.name for field in dataclasses.fields(known[name][1])} - {"seed", "size"}
    for option in config:
        if option in ("seed", "size"):
            raise ConfigError(
                f"dataset {name}: {option} is no option of config; set seed or num_tasks beside it"
            )
        if option not in options:
            raise unknown_name(f"dataset {name} has no option", option, options)


def _cut_of(answer: str, library: ModuleType) -> Callable[[str], str | None]:
    """Returns a function that takes a reply, and returns its answer or None if it has none."""
    cuts: dict[str, Callable[[str], str | None]] = {
        "tags": library.utils.extract_answer,
        "whole": str.strip,
        "last_line": lambda reply: reply.strip().rpartition("\n")[2].strip(),
        "number": lambda reply: next(reversed(numbers(reply)), None),
    }
    check_choice("answer", answer, cuts)
    return cuts[answer]
