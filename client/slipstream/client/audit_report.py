"""Says what an audit has found: a refusal, surprises, and a table for one screen."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

from slipstream.client.audit import OWN, PLAIN, Kind, Played, Task, poor, text_of
from slipstream.client.terminal import aligned, counted

# Tasks from which the same right answer everywhere is a surprise.
_SEVERAL = 4
# Characters of a right answer that no prompt holds by chance.
_LONG = 12
# Characters of a text that a line shows.
_SHOWN = 60


@dataclass(frozen=True)
class Finding:
    """One thing that the audit found; a refusal cannot be meant."""

    text: str
    is_refused: bool = False


def findings(played: Played) -> list[Finding]:
    """Returns what is wrong or surprising, refusals first."""
    found = [*_openings(played), *_failures(played), *_rewards(played), *_answers(played)]
    return sorted(found, key=lambda finding: not finding.is_refused)


def _openings(played: Played) -> list[Finding]:
    found = []
    if played.unequal:
        index, (first, second) = min(played.unequal.items())
        what = f"{_of(len(played.unequal), len(played.tasks))}, such as task {index}, "
        what += f"begin otherwise when they are reset twice with one seed: {_differ(first, second)}"
        cause = "; the members of a group would not read the same prompt"
        found.append(Finding(what + cause, is_refused=True))
    for when in played.other_tasks:
        cause = f"tasks() gives other tasks {when}: draw them with a fixed seed, in a fixed order"
        found.append(Finding(cause, is_refused=True))
    return found


def _failures(played: Played) -> list[Finding]:
    found = []
    if played.unbegun:
        index, cause = min(played.unbegun.items())
        # A task alone, or all of them, need no number.
        is_most = 2 * len(played.unbegun) >= len(played.tasks) + len(played.unbegun)
        text = cause if index == 0 and is_most else f"task {index} cannot begin: {cause}"
        found.append(Finding(text, is_refused=is_most))
    for kind, causes in played.failures.items():
        if not causes:
            continue
        index, cause = min(causes.items())
        ended = len(causes) + len(played.rewards.get(kind, {}))
        is_most = 2 * len(causes) >= ended
        if not (is_most and index == 0):
            where = f"{_of(len(causes), ended)}, such as task {index}"
            cause = f"the judge fails for {kind.value} in {where}: {cause}"
        found.append(Finding(cause, is_refused=is_most))
    if played.left_out:
        text = f"{counted(len(played.left_out), 'play')} of an episode had no time within "
        found.append(Finding(f"{text}{played.seconds:.0f} s, so that nothing is known of them"))
    return found


def _rewards(played: Played) -> list[Finding]:
    right, empty = played.rewards.get(Kind.RIGHT, {}), played.rewards.get(Kind.EMPTY, {})
    found, bad = [], poor(played)
    if bad:
        # The task whose right answer is the shortest to read.
        index = min(bad, key=lambda each: (len(played.replies[Kind.RIGHT][each]), each))
        says = f"the right answer earned {right[index]:g}, an empty reply {empty[index]:g}"
        if empty[index] > 0:
            says = f"an empty reply earned {empty[index]:g}, and the right answer {right[index]:g}"
        text = f"{says} in {_of(len(bad), len(right))}, such as {_example(played, index)}"
        is_most = 2 * len(bad) >= len(right)
        if is_most and empty[index] <= 0:
            text += "; if replies must have a form, let reset() set self.right_reply"
        # An answer may be for people alone.
        names_reply = any(task.reply for task in played.tasks if task.index in bad)
        found.append(Finding(text, is_refused=is_most and names_reply))
    for kind, _, what in _RULES:
        rewards, wrong = played.rewards.get(kind, {}), _wrong(played, kind)
        # Half of "10.0" is 10, which is right too.
        if wrong and (kind is not Kind.CUT or len(wrong) == len(rewards) > 1):
            index = wrong[0]
            text = f"{kind.value} {what} in {_of(len(wrong), len(rewards))}: it earned "
            text += f"{rewards[index]:g}, the right answer {right[index]:g}, such as for "
            found.append(Finding(text + _example(played, index, kind)))
    return [*found, *_free(played)]


def _free(played: Played) -> list[Finding]:
    """Returns what was earned for nothing where no right answer is known."""
    empty, found = played.rewards.get(Kind.EMPTY, {}), []
    word, wrong = (played.rewards.get(kind, {}) for kind in (Kind.WORD, Kind.WRONG))
    free = [i for i, reward in word.items() if i in empty and empty[i] >= max(reward, 1e-9)]
    if free:
        text = f"an empty reply earned {empty[free[0]]:g} in {_of(len(free), len(word))}, no less "
        found.append(Finding(text + "than the other replies that were tried"))
    right = played.rewards.get(Kind.RIGHT, {})
    paid = [index for index, reward in wrong.items() if reward > 0 and index not in right]
    if paid:
        text = f"a reply that is wrong earned {wrong[paid[0]]:g} in {_of(len(paid), len(wrong))}"
        found.append(Finding(f"{text}, such as for {_example(played, paid[0], Kind.WRONG)}"))
    return found


# What is wrong by the share of the right answer's reward that a reply earned beyond an empty one.
_RULES: tuple[tuple[Kind, Callable[[float], bool], str], ...] = (
    (Kind.WRONG, lambda share: share >= 1, "earned as much as the right answer"),
    (Kind.OTHER, lambda share: share >= 1, "earned as much as the right one"),
    # Length may have a price.
    (Kind.THOUGHT, lambda share: share > 0.5, "earned as when it is said"),
    (Kind.BEHIND, lambda share: share < 0.5, "earned less than without them"),
    (Kind.CUT, lambda share: share >= 1, "earned as much as the whole one"),
    (Kind.AGAIN, lambda share: abs(share - 1) > 1e-6, "earned another reward"),
)


def _wrong(played: Played, kind: Kind) -> list[int]:
    """Returns the tasks in which a kind of `_RULES` did not earn what it should."""
    right, empty = (played.rewards.get(of, {}) for of in (Kind.RIGHT, Kind.EMPTY))
    is_wrong = next(rule for of, rule, _ in _RULES if of is kind)
    good = (right.keys() & empty.keys()) - poor(played).keys()
    return [
        index
        for index, reward in played.rewards.get(kind, {}).items()
        if index in good and is_wrong((reward - empty[index]) / (right[index] - empty[index]))
    ]


def _answers(played: Played) -> list[Finding]:
    known = [task for task in played.tasks if task.is_known]
    found = _prompts(played)
    if len(known) >= _SEVERAL and len({task.answer or task.reply for task in known}) == 1:
        text = f"the right answer is the same in all {len(known)} tasks: "
        found.append(Finding(text + _quoted(known[0].answer or known[0].reply)))
    lengths = sorted(len(task.answer) for task in known)
    longest = max(known, key=lambda task: len(task.answer), default=None)
    if longest is not None and lengths[-1] > 20 * max(lengths[len(lengths) // 2], _LONG):
        text = f"the right answer of task {longest.index} is far longer than others: "
        found.append(Finding(text + _quoted(longest.answer)))
    told = [task for task in known if _tells(task.prompt, task.answer.strip())]
    if 2 * len(told) >= max(len(known), 1):
        text = f"the prompt holds the right answer in {_of(len(told), len(known))}, such as task "
        found.append(Finding(f"{text}{told[0].index}: {_quoted(told[0].answer)}"))
    if known and len(known) < len(played.tasks):
        lacking = next(task for task in played.tasks if not task.is_known)
        text = f"{_of(len(played.tasks) - len(known), len(played.tasks))}, such as task "
        found.append(Finding(f"{text}{lacking.index}, have no right answer"))
    return found


def _tells(prompt: str, answer: str) -> bool:
    """Whether a prompt holds an answer that no prompt holds by chance, or calls it the answer."""
    said = rf"answer\W{{0,3}}(?:is)?\W{{0,3}}{re.escape(answer)}(?!\w)"
    return bool(answer) and (
        (len(answer) >= _LONG and answer in prompt)
        or re.search(said, prompt, re.IGNORECASE) is not None
    )


def _prompts(played: Played) -> list[Finding]:
    first: dict[str, Task] = {}
    for task in played.tasks:
        messages = task.opening.messages
        if messages and not any(message.content.strip() or message.parts for message in messages):
            return [Finding(f"task {task.index} begins without a text")]
        # Two names of one answer would be found too, so it is only told.
        same = first.setdefault(repr(text_of(task.opening)), task)
        is_shown = not any(part.image for message in messages for part in message.parts)
        if is_shown and messages and (same.answer, same.reply) != (task.answer, task.reply):
            text = (
                f"tasks {same.index} and {task.index} ask the same, {_quoted(task.prompt)}, with "
            )
            text += f"the answers {_quoted(same.answer or same.reply)} and "
            return [Finding(text + _quoted(task.answer or task.reply))]
    return []


def headline(played: Played) -> str:
    """Returns number of tasks and what was seen at the first one, in one line."""
    number = played.num_tasks
    tasks = counted(number, "task") if number else "tasks without end"
    if played.first_call:
        return f"{tasks}, the first call is {played.first_call}"
    return f"{tasks}, {len(played.tasks)} of them played"


def table(played: Played) -> list[str]:
    """Returns the lines of the table: what each reply earned, in how many tasks."""
    rows = [("reply", "tasks", "reward", "as it should")]
    known = [task for task in played.tasks if task.is_known]
    for kind in Kind:
        rewards = played.rewards.get(kind, {})
        failed = len(played.failures.get(kind, {}))
        if rewards or failed:
            name = kind.value
            if kind is Kind.RIGHT and played.form not in (OWN, PLAIN):
                name += f", as {_quoted(played.form.replace('{}', '...'))}"
            ends = f"{failed} failed" if failed else _verdict(played, kind)
            rows.append((name, f"{len(rewards) + failed}", _spread(rewards), ends))
    lines = aligned(rows) if len(rows) > 1 else []
    if played.tasks and not known and Kind.OWN not in played.rewards and not played.first_call:
        lines.append("no right answer is known: let reset() set self.expected_answer to play it")
    return lines


def _verdict(played: Played, kind: Kind) -> str:
    if kind in (Kind.RIGHT, Kind.EMPTY):
        wrong = len(poor(played))
        is_known = Kind.RIGHT in played.rewards
    else:
        is_known = any(of is kind for of, *_ in _RULES) and Kind.RIGHT in played.rewards
        wrong = len(_wrong(played, kind)) if is_known else 0
    return ("yes" if not wrong else f"no, {counted(wrong, 'task')}") if is_known else ""


def _spread(rewards: Mapping[int, float]) -> str:
    values = list(rewards.values())
    if not values or min(values) == max(values):
        return f"{values[0]:g}" if values else "-"
    return f"{min(values):g} to {max(values):g}, mean {fmean(values):.3g}"


def _of(number: int, total: int) -> str:
    return f"{number} of {counted(total, 'task')}"


def _example(played: Played, index: int, kind: Kind = Kind.RIGHT) -> str:
    task = next(task for task in played.tasks if task.index == index)
    text = f"task {index}, {_quoted(task.prompt)}, reply {_quoted(played.replies[kind][index])}"
    if kind is not Kind.RIGHT:
        text += f", right {_quoted(task.answer or task.reply)}"
    return text


def _differ(first: str, second: str) -> str:
    if first == second:
        return "not in their texts"
    start = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    start = max(0, start - _SHOWN // 3)
    return f"{_quoted(first[start:])} and {_quoted(second[start:])}"


def _quoted(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
