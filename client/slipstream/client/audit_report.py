"""Says what an audit has found: a refusal, surprises, and a table for one screen."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from statistics import fmean

from slipstream.client.audit import MOST_TURNS
from slipstream.client.audit_data import of, quoted, surprises
from slipstream.client.audit_plays import OWN, PLAIN, Played, PlayedEpisode, PlayedReply
from slipstream.client.conversion import MAX_ANSWER_BYTES
from slipstream.client.terminal import aligned, counted
from slipstream.core.types import FULL_REWARD, kept_metrics

# Values by which two errors of one cause differ.
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
# Characters before a difference that a line shows.
_BEFORE = 20
# Tasks in which all replies must have earned nothing before that is refused.
MANY_TASKS = 20
# Share of right replies below which a policy that guesses does not earn what silence does.
DEAR_MISTAKE = 0.5
# Seconds in which a worker should judge the episodes of a step.
_MOST_STEP_S = 60.0


@dataclass(frozen=True)
class AuditFinding:
    """One thing that the audit found; a refusal cannot be meant."""

    text: str
    is_refused: bool = False
    # Whether it tells of plays without time, of which a run's first second has some.
    is_of_time: bool = False


def findings(played: Played) -> list[AuditFinding]:
    """Returns what is wrong or surprising, refusals first."""
    remarks = [*_openings(played), *_failures(played), *_rewards(played), *_turns(played)]
    remarks += map(AuditFinding, _cut(played))
    has_turns = any(play.num_turns > 1 for *_, play in played.every())
    remarks += map(AuditFinding, surprises(played.rows, is_interactive=has_turns))
    return sorted(remarks, key=lambda finding: not finding.is_refused)


def _openings(played: Played) -> list[AuditFinding]:
    remarks = []
    if played.unequal:
        index, (first, second) = min(played.unequal.items())
        what = f"{of(len(played.unequal), len(played.tasks))}, such as task {index}, "
        start = max(0, len(commonprefix([first, second])) - _BEFORE)
        texts = f"{quoted(first[start:])} and {quoted(second[start:])}"
        texts = "not in their texts" if first == second else texts
        what += f"begin otherwise when they are reset twice with one seed: {texts}"
        cause = "; the members of a group would not read the same prompt"
        remarks.append(AuditFinding(what + cause * played.limits.compares, played.limits.compares))
    for when in played.other_tasks:
        cause = f"tasks() gives other tasks {when}: draw them with a fixed seed, in a fixed order"
        remarks.append(AuditFinding(cause, is_refused=True))
    return remarks


def _failures(played: Played) -> list[AuditFinding]:
    remarks = [AuditFinding(f"close() fails: {played.unclosed}")] * bool(played.unclosed)
    if played.first_call == "none" and not played.unbegun:
        remarks.append(AuditFinding("run() ended without a call to its endpoint", is_refused=True))
    if played.beside:
        text = f"of two episodes at once one fails, and a run plays many: {played.beside}"
        # Workers may have a place each.
        remarks.append(AuditFinding(text, is_refused=played.limits.at_once > 1))
    if played.unbegun:
        index, cause = min(played.unbegun.items())
        # A task alone, or all of them, need no number.
        is_most = 2 * len(played.unbegun) >= len(played.rows) + len(played.unbegun)
        text = cause if index == 0 and is_most else f"task {index} cannot begin: {cause}"
        remarks.append(AuditFinding(text, is_refused=is_most))
    alike = defaultdict[str, list[tuple[int, PlayedReply, PlayedEpisode]]](list)
    for place in filter(lambda place: place[-1].failure, played.every()):
        alike[_VALUES.sub("", place[-1].failure)].append(place)
    for places in alike.values():
        index, kind, play = places[0]
        text = play.failure
        text += f" (in {counted(len(places), 'play')})" if len(places) > 1 else ""
        # In half of the plays of one kind or more.
        is_most = any(2 * len(played.rewards(of)) <= len(played.plays[of]) for _, of, _ in places)
        if not (is_most and index == 0):
            text = f"the judge fails for {kind.value} in task {index}: {text}"
        remarks.append(AuditFinding(text, is_refused=is_most))
    if played.left_out:
        text = f"{counted(len(played.left_out), 'play')} of an episode had no time within "
        text += f"{played.seconds:.0f} s, so that nothing is known of them"
        remarks.append(AuditFinding(text, is_of_time=True))
    return remarks


def _rewards(played: Played) -> list[AuditFinding]:
    right = played.rewards(PlayedReply.RIGHT)
    empty = played.rewards(PlayedReply.EMPTY)
    remarks = []
    bad = played.poor()
    if bad:
        # The task whose right answer is the shortest to read.
        index = min(
            bad, key=lambda number: (len(played.plays[PlayedReply.RIGHT][number].said), number)
        )
        says = f"the right answer earned {right[index]:g}, an empty reply {empty[index]:g}"
        if empty[index] > 0:
            says = f"an empty reply earned {empty[index]:g}, and the right answer {right[index]:g}"
        text = f"{says} in {of(len(bad), len(right))}, such as {_example(played, index)}"
        earned = [play.earned for *_, play in played.every() if not play.failure]
        if len({*earned}) == 1:
            text += f"; each of the {len(earned)} replies that were tried earned {earned[0]:g}"
        is_most = 2 * len(bad) >= len(right)
        if is_most and empty[index] <= 0:
            text += "; if replies must have a form, let reset() set self.right_reply"
        remarks.append(AuditFinding(text, is_refused=is_most and not _may_be_meant(played, bad)))
    for kind, (_, what) in _RULES.items():
        rewards = played.rewards(kind)
        wrong = _wrong(played, kind)
        # Half of "10.0" is 10, which is right too.
        if wrong and (kind is not PlayedReply.CUT or len(wrong) == len(rewards) > 1):
            index = wrong[0]
            text = f"{kind.value} {what} in {of(len(wrong), len(rewards))}: it earned "
            text += f"{rewards[index]:g}, the right answer {right[index]:g}, such as for "
            remarks.append(AuditFinding(text + _example(played, index, kind)))
    remarks += filter(None, [_price_of_silence(played)])
    below = [index for index, reward in right.items() if reward < 0]
    if below:
        text = f"the right answer earned {right[below[0]]:g}, less than nothing, in "
        text += f"{of(len(below), len(right))}, such as {_example(played, below[0])}"
        remarks.append(AuditFinding(text))
    index, kind, highest = _highest(played)
    # Rounding may raise a sum of token rewards.
    if highest > 2 - FULL_REWARD:
        text = f"{kind.value} earned {highest:g} in task {index}: an evaluation has pass rates "
        remarks.append(
            AuditFinding(f"{text}only if evaluations.pass_reward says which reward passes")
        )
    return [*remarks, *_free(played)]


def _may_be_meant(played: Played, bad: Mapping[int, float]) -> bool:
    """Whether right answers that earn no more than silence may be answers for people alone.

    They are not if silence is paid, if the environment names the whole right reply, or if all
    replies in many tasks earned nothing.
    """
    if any(task.reply for task in played.tasks if task.index in bad):
        return False
    empty_rewards = played.rewards(PlayedReply.EMPTY)
    paid_silence = [index for index in bad if empty_rewards[index] > 0]
    if 2 * len(paid_silence) >= len(bad):
        return False
    rewards = {play.earned for *_, play in played.every() if not play.failure}
    return len(played.rewards(PlayedReply.RIGHT)) < MANY_TASKS or len(rewards) > 1


def _price_of_silence(played: Played) -> AuditFinding | None:
    """Returns a line if a wrong reply costs so much that silence is the better guess, or None."""
    right_rewards = played.rewards(PlayedReply.RIGHT)
    empty_rewards = played.rewards(PlayedReply.EMPTY)
    wrong_rewards = played.rewards(PlayedReply.OTHER) | played.rewards(PlayedReply.WRONG)
    shares: dict[int, float] = {}
    for index in right_rewards.keys() & empty_rewards.keys() & wrong_rewards.keys():
        gain = right_rewards[index] - wrong_rewards[index]
        loss = empty_rewards[index] - wrong_rewards[index]
        if 0 < loss < gain:
            shares[index] = loss / gain
    dear = [index for index, share in shares.items() if share > DEAR_MISTAKE]
    if not dear or 2 * len(dear) < len(right_rewards):
        return None
    index = min(dear)
    return AuditFinding(
        f"a wrong reply earned {wrong_rewards[index]:g}, an empty one {empty_rewards[index]:g} and "
        f"the right one {right_rewards[index]:g} in {of(len(dear), len(right_rewards))}: a policy "
        f"that is right in less than {shares[index]:.0%} of its replies learns to say nothing"
    )


def _highest(played: Played) -> tuple[int, PlayedReply, float]:
    plays = ((i, kind, play.earned) for i, kind, play in played.every() if not play.failure)
    return max(plays, key=lambda place: place[-1], default=(0, PlayedReply.EMPTY, 0.0))


def _turns(played: Played) -> list[AuditFinding]:
    repeated = (
        "step() gives the messages of reset() again, which the model has read: it reads them "
    )
    remarks = [AuditFinding(f"{repeated}twice; give what follows the reply alone")] * played.repeats
    going = [place for place in played.every() if not (place[-1].is_done or place[-1].failure)]
    endless = [kind.value for _, kind, play in going if play.num_turns == MOST_TURNS]
    if endless:
        text = f"{endless[0]} has not ended an episode after {MOST_TURNS:,} turns"
        remarks.append(AuditFinding(f"{text}: let step() return done=True at some turn"))
    wrong = (PlayedReply.EMPTY, PlayedReply.WORD, PlayedReply.WRONG, PlayedReply.OTHER)
    paid = [place for place in going if place[1] in wrong and place[-1].earned > 0]
    for index, kind, play in paid[:1]:
        text = f"{kind.value} earned {play.earned:g} in {counted(play.num_turns, 'turn')} without "
        text += f"an end, such as for task {index}: turns that do not end are paid"
        remarks.append(AuditFinding(text))
    return remarks


def _cut(played: Played) -> Iterator[str]:
    """Yields lines on what a run would cut or leave out."""
    limits = played.limits
    plays = played.every()
    tasks = played.tasks
    max_turns = MOST_TURNS if limits.max_turns is None else limits.max_turns
    longer = [(index, kind) for index, kind, play in plays if play.num_turns > max_turns]
    for index, kind in longer[:1]:
        text = f"{kind.value} goes on in task {index} after {counted(max_turns, 'turn')}, where a "
        yield f"{text}run ends the episode with what it earned so far (sampling.max_turns)"
    metrics = max((play.metrics for *_, play in plays), key=len, default={})
    if left_out := len(metrics) - len(kept_metrics(metrics)):
        text = f"of {counted(len(metrics), 'metric')} of an episode a run leaves out {left_out}"
        yield f"{text}: 16 are kept, each by the first 40 characters of its name"
    limit = limits.max_reply_tokens
    above = [task for task in tasks if limit is not None and task.max_reply_tokens > limit]
    for task in above[:1]:
        text = f"max_reply_tokens = {task.max_reply_tokens} of task {task.index} is more than a "
        yield f"{text}run allows, whose replies end after sampling.max_reply_tokens = {limit}"
    cut = [task.index for task in tasks if len(task.answer.encode()) > MAX_ANSWER_BYTES]
    if cut:
        text = (
            f"expected_answer is longer than {MAX_ANSWER_BYTES} bytes in {of(len(cut), len(tasks))}"
        )
        yield f"{text}, such as task {cut[0]}: a run keeps the first ones"


def slowness(played: Played, *, limit_s: float) -> list[AuditFinding]:
    """Returns whether the judge is slow for the episodes of a step, which one worker plays."""
    num_episodes = played.limits.num_episodes
    seconds = sum(play_s for play_s, _ in played.timed)
    calls = sum(num_calls for _, num_calls in played.timed)
    plays = played.every()
    replies = sum(play.num_turns for *_, play in plays) / max(len(plays), 1)
    each_s = seconds / max(calls, 1) * replies
    longest_s = max(played.calls_s, default=0.0)
    # A judge may start a program for its first reply.
    if not calls and (shortest_s := min(played.calls_s, default=0.0)) > 1.0:
        text = (
            f"the judge is slow: {shortest_s:.2g} s for a reply, so that none were judged at once"
        )
        return [AuditFinding(f"{text}, as a run does")]
    step_s = each_s * num_episodes
    if longest_s <= max(1.0, limit_s / 2) and step_s <= _MOST_STEP_S:
        return []
    text = f"the judge is slow: {each_s:.2g} s an episode, so that {num_episodes} episodes take "
    text += f"{step_s:.0f} s of one worker, and {longest_s:.2g} s for a reply, of at most "
    return [AuditFinding(f"{text}{limit_s:g} s for a call")]


def _silent(played: Played) -> set[int]:
    """Returns the tasks in which an empty reply alone earned something."""
    paid = [(index, kind) for index, kind, play in played.every() if play.earned > 0]
    return {index for index, _ in paid} - {
        index for index, kind in paid if kind is not PlayedReply.EMPTY
    }


def _free(played: Played) -> list[AuditFinding]:
    """Returns what was earned for nothing where no right answer is known."""
    empty = played.rewards(PlayedReply.EMPTY)
    remarks = []
    word, wrong = (played.rewards(kind) for kind in (PlayedReply.WORD, PlayedReply.WRONG))
    free = [i for i, reward in word.items() if i in empty and empty[i] >= max(reward, 1e-9)]
    if free:
        text = f"an empty reply earned {empty[free[0]]:g} in {of(len(free), len(word))}, no less "
        is_most = 2 * len(_silent(played)) >= len(word)
        text += "than the other replies that were tried"
        remarks.append(AuditFinding(text, is_refused=is_most))
    right = played.rewards(PlayedReply.RIGHT)
    full = max(1.0, _highest(played)[-1])
    paid = [index for index, reward in wrong.items() if reward >= full and index not in right]
    if paid:
        text = f"a reply that is wrong earned {wrong[paid[0]]:g} in {of(len(paid), len(wrong))}"
        remarks.append(
            AuditFinding(f"{text}, such as for {_example(played, paid[0], PlayedReply.WRONG)}")
        )
    return remarks


# The faults by the share of the right answer's reward that a reply earned beyond an empty one.
_RULES: dict[PlayedReply, tuple[Callable[[float], bool], str]] = {
    PlayedReply.WRONG: (lambda share: share >= 1, "earned as much as the right answer"),
    PlayedReply.OTHER: (lambda share: share >= 1, "earned as much as the right one"),
    PlayedReply.FORMED: (lambda share: share >= 1, "earned as much as the right one or more"),
    # Length may have a price.
    PlayedReply.THOUGHT: (lambda share: share > 0.5, "earned as when it is said"),
    PlayedReply.BEHIND: (lambda share: share < 0.5, "earned less than without them"),
    PlayedReply.CUT: (lambda share: share >= 1, "earned as much as the whole one"),
    PlayedReply.HEDGED: (lambda share: share >= 1, "earned as much as the right one alone"),
    PlayedReply.LONGER: (lambda share: share > 1 + 1e-6, "earned more than without them"),
    PlayedReply.WORDS: (
        lambda share: share >= 0.5,
        "earned half of what the right answer does, or more",
    ),
    PlayedReply.AGAIN: (
        lambda share: abs(share - 1) > 1e-6,
        "earned another reward while other episodes were open, which share what __init__ made,",
    ),
}


def _wrong(played: Played, kind: PlayedReply) -> list[int]:
    """Returns the tasks in which a kind of `_RULES` did not earn what it should."""
    right, empty = (played.rewards(of) for of in (PlayedReply.RIGHT, PlayedReply.EMPTY))
    is_wrong, _ = _RULES[kind]
    good = {index for index in right.keys() & empty.keys() if right[index] > empty[index]}
    return [
        index
        for index, reward in played.rewards(kind).items()
        if index in good and is_wrong((reward - empty[index]) / (right[index] - empty[index]))
    ]


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
    rows += [_table_row(played, kind) for kind in PlayedReply if played.plays[kind]]
    lines = aligned(rows) if len(rows) > 1 else []
    has_right = any(task.right for task in played.tasks) or played.plays[PlayedReply.OWN]
    if played.tasks and not has_right and not played.first_call:
        lines.append("no right answer is known: let reset() set self.expected_answer to play it")
    return lines


def _table_row(played: Played, kind: PlayedReply) -> tuple[str, str, str, str]:
    """Returns the cells of one reply: its name, tasks, rewards, and whether they are as ruled."""
    name = kind.value
    if kind is PlayedReply.RIGHT and played.form not in (OWN, PLAIN):
        name += f", as {quoted(played.form.replace('{}', '...'))}"
    plays = played.plays[kind].values()
    rewards = sorted(played.rewards(kind).values())
    spread = f"{rewards[0]:g}" if rewards else "-"
    if rewards and rewards[-1] > rewards[0]:
        spread += f" to {rewards[-1]:g}, mean {fmean(rewards):.3g}"
    is_ruled = kind in _RULES or kind in (PlayedReply.RIGHT, PlayedReply.EMPTY)
    num_failed = len(plays) - len(rewards)
    num_unended = sum(not (play.is_done or play.failure) for play in plays)
    verdict = ""
    if num_failed:
        verdict = f"{num_failed} failed"
    elif num_unended:
        verdict = f"{num_unended} had not ended"
    elif is_ruled and played.rewards(PlayedReply.RIGHT):
        num_wrong = len(_wrong(played, kind) if kind in _RULES else played.poor())
        verdict = f"no, {counted(num_wrong, 'task')}" if num_wrong else "yes"
    return name, f"{len(plays)}", spread, verdict


def _example(played: Played, index: int, kind: PlayedReply = PlayedReply.RIGHT) -> str:
    task = next(task for task in played.tasks if task.index == index)
    reply = played.plays[kind][index].said
    text = f"task {index}, {quoted(task.prompt)}, reply {quoted(reply)}"
    return text if kind is PlayedReply.RIGHT else f"{text}, right {quoted(task.right)}"
