"""The audit on planted faults of data, judges and environments, and on sound ones."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slipstream.client.audit import Audit
from slipstream.client.audit_data import key_of, shared_questions
from slipstream.client.audit_plays import (
    EpisodeLimits,
    Played,
    PlayedEpisode,
    PlayedReply,
)
from slipstream.client.audit_report import AuditFinding, findings, slowness, table
from slipstream.client.episode_host import EpisodeHost
from slipstream.environments.questions import MathJudge
from slipstream.v1 import environment_pb2 as pb

pytestmark = pytest.mark.process
in_one_loop = pytest.mark.asyncio(loop_scope="module")
DATA = Path(__file__).parents[2] / "data" / "audit"


@pytest.fixture(scope="module", autouse=True)
def shared_judges() -> Iterator[None]:
    """The cases share one program that compares mathematics, which imports much."""
    judges: list[MathJudge] = []
    running_program = MathJudge._running_program

    async def shared_program(judge: MathJudge) -> object:
        judges.append(judge)
        return await running_program(judges[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MathJudge, "_running_program", shared_program)
        yield


def cases(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def each_of(name: str) -> Iterator[object]:
    """The builder's cases, then forty and more of somebody who did not build the audit.

    Those of several functions start a sandbox for each function and each of the others.
    """
    further = cases("check_faults.jsonl") if name == "faults.jsonl" else []
    for case in cases(name) + cases(f"strangers_{name}") + further:
        is_long = case["class"].endswith(":Functions") and len(case["rows"]) > 1
        yield pytest.param(case, id=case["name"], marks=[pytest.mark.long] * is_long)


async def audited(
    case: dict, folder: Path, *, limit_s: float = 600.0
) -> list[AuditFinding]:
    args = case["args"]
    if case["rows"] is not None:
        path = folder / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in case["rows"]))
        args = args | {"path": str(path)}
    host = EpisodeHost()
    spec = {
        "reference": case["class"],
        "args_json": json.dumps(args),
        "search_path": str(DATA),
    }
    loading = await host.answer(pb.WorkerCommand(load={"spec": spec}))
    if loading.HasField("failure"):
        return [AuditFinding(loading.failure.message, is_refused=True)]

    async def ask(**command: object) -> pb.WorkerMessage:
        return await host.answer(pb.WorkerCommand(**command))

    audit = Audit(host, ask, loaded=loading.loaded, limit_s=limit_s)
    played = await audit.run()
    assert [*table(played)]
    return findings(played)


@in_one_loop
@pytest.mark.parametrize("case", each_of("faults.jsonl"))
async def test_a_planted_fault_is_found(case: dict, tmp_path: Path) -> None:
    findings = await audited(case, tmp_path)
    matching = [finding for finding in findings if case["says"] in finding.text]
    assert [finding.is_refused for finding in matching][:1] == [case["refused"]], (
        findings
    )


@in_one_loop
@pytest.mark.parametrize("case", each_of("sound.jsonl"))
async def test_what_is_sound_is_neither_refused_nor_told(
    case: dict, tmp_path: Path
) -> None:
    findings = await audited(case, tmp_path)
    assert not [
        finding
        for finding in findings
        if finding.is_refused or not case.get("may_tell")
    ]


@pytest.mark.parametrize(
    ("instruction", "change"),
    [
        ("{} Only the number.", str),
        ("{}", lambda text: text.replace(" ", "  ")),
        ("{}", str.upper),
        ("{} Think step by step.", str),
        ("Solve this.\n{}", lambda text: text.replace(" ", "\n")),
    ],
)
def test_a_question_is_the_same_in_other_words_around_it_and_other_spaces_and_case(
    instruction: str, change: Callable[[str], str]
) -> None:
    def keys(rows: list[tuple[str, int]], form: str) -> list[tuple[str, str]]:
        return [
            (key_of(form.format(question)), str(answer)) for question, answer in rows
        ]

    sums = [(f"What is {a} + {a + 9}?", 2 * a + 9) for a in range(3, 13)]
    trained = keys(sums, "{} Only the number.")
    other_rows = [(f"What is {a} + 20?", a + 20) for a in (3, 5, 7)]
    assert {str(answer) for _, answer in other_rows} & {answer for _, answer in trained}
    for rows, shared in ((sums[2:5], 3), (other_rows, 0), (other_rows + sums[:1], 1)):
        heldout = keys(
            [(change(question), answer) for question, answer in rows], instruction
        )
        assert shared_questions(heldout, trained) == (len(rows), shared)


def test_many_rows_are_compared_on_both_sides() -> None:
    trained = [(f"what is {a} + 20?", str(a + 20)) for a in range(10, 5000)]
    assert shared_questions(trained[:1000], trained) == (500, 500)


@pytest.mark.parametrize(
    ("calls_s", "timed_s", "num_episodes", "says"),
    [
        ([0.1] * 20, 2.0, 64, ""),
        ([0.1] * 20, 2.0, 1024, "0.1 s an episode, so that 1024 episodes take 102 s"),
        ([9.0], 9.0, 4, "9 s for a reply, of at most 10 s for a call"),
    ],
)
def test_a_slow_judge_is_told(calls_s, timed_s, num_episodes, says) -> None:
    # An episode that was played to choose a form is not timed.
    played = Played(
        20, limits=EpisodeLimits(num_episodes=num_episodes), calls_s=[*calls_s, 0.1]
    )
    played.timed = [(timed_s, len(calls_s)), (0.0, 0)]
    played.plays[PlayedReply.RIGHT] = dict.fromkeys(
        range(len(calls_s)), PlayedEpisode(num_turns=1, is_done=True)
    )
    findings = slowness(played, limit_s=10.0)
    assert [finding.is_refused for finding in findings] == [False] * bool(says)
    assert says in "".join(finding.text for finding in findings)


def test_a_judge_that_is_too_slow_to_be_timed_is_told() -> None:
    slow = "3 s for a reply, so that none were judged at once"
    for calls_s, says in (([3.0] * 4, slow), ([0.5] * 4, ""), ([3.0, 0.5], "")):
        played = Played(20, calls_s=calls_s, timed=[(0.0, 0)])
        findings = slowness(played, limit_s=60.0)
        assert says in "".join(finding.text for finding in findings)
        assert len(findings) == bool(says)


async def test_what_had_no_time_is_told(tmp_path: Path) -> None:
    case = next(case for case in cases("sound.jsonl") if len(case["rows"] or ()) > 1)
    assert not [
        finding
        for finding in await audited(case, tmp_path)
        if "had no time" in finding.text
    ]
    findings = await audited(case, tmp_path, limit_s=0.0)
    assert [
        finding.is_refused for finding in findings if "had no time" in finding.text
    ] == [False]
