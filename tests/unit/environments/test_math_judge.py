"""The default judge: kinds of right answers, and the program that compares."""

import asyncio
import contextlib
import itertools
import json
from pathlib import Path

import psutil
import pytest
from slipstream.client import answer_of
from slipstream.environments.math_judge import answer_kinds, sizes
from slipstream.environments.math_judge.comparisons import MathJudge
from slipstream.environments.math_judge.expressions import parsed
from slipstream.environments.math_judge.numerals import number_in
from slipstream.environments.math_judge.statements import final_statement
from support.rigs.waiting import until

pytest.importorskip("math_verify")

TABLE = Path(__file__).parents[2] / "data" / "judge_pairs.jsonl"
PAIRS = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
NOTHING = {"right": False, "readable": False, "judge_timeout": False}
# An integral that nobody solves in the time of a test.
HARD = r"\boxed{\int_0^1 \sin(x^7 + \exp(x) \cos x) \, dx}"


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
def test_a_pair_of_reply_and_answer_has_the_verdict_of_a_person(kind: str) -> None:
    wrong = []
    for pair in PAIRS:
        if pair["kind"] == kind:
            reply = answer_of(pair["reply"])
            verdict = answer_kinds.judge(
                pair["answer"], reply, pair.get("question", "")
            )
            if verdict.right != bool(pair["value"]):
                wrong.append(pair)
    assert not wrong, "\n".join(map(str, wrong))


def test_the_table_has_pairs_of_every_kind_and_verdict() -> None:
    assert len(PAIRS) >= 600
    assert len(
        {(pair["answer"], pair["reply"], pair.get("question")) for pair in PAIRS}
    ) == len(PAIRS)
    recognised = {
        answer_kinds.kind_of(pair["answer"], pair.get("question", "")) for pair in PAIRS
    }
    assert recognised | {"bound"} == {kind.name for kind in answer_kinds.KINDS}


@pytest.mark.parametrize(
    ("answer", "question", "kind"),
    [
        (r"\textbf{(C)}\ 12", "", "choice"),
        ("B", "", "choice"),
        ("yes", "", "yes or no"),
        (r"\emptyset", "", "nothing"),
        ("2000-01-31", "", "date"),
        ("5:30 p.m.", "", "time"),
        ("10:30", "", "ratio"),
        ("10:30", "At what time does it begin?", "time"),
        (r"\$18.90", "", "money"),
        ("1,234", "", "number"),
        ("three quarters", "", "number"),
        ("2H2 + O2 -> 2H2O", "", "reaction"),
        ("> 18", "", "bound"),
        ("(2, 5]", "", "interval"),
        ("(2, 5)", "Solve the inequality.", "interval"),
        ("(2, 5)", "", "list"),
        ("9.8 m/s^2", "", "quantity"),
        ("2, 3", "", "list"),
        ("R U R'", "", "codes"),
        ("c a b", "", "codes"),
        ("a b c", "", "expression"),
        ("a b c", "Sort the letters c, a and b.", "codes"),
        ("2 x y", "", "expression"),
        ("XI", "", "word"),
        ("0b1011", "", "word"),
        ("192.168.0.1", "", "word"),
        ("3-1", "", "word"),
        ("1h30m", "", "quantity"),
        ("0xff", "", "word"),
        ("x^2 + 1", "", "expression"),
        ("7!", "", "expression"),
        ("George Washington", "", "text"),
    ],
)
def test_the_right_answer_decides_its_kind(
    answer: str, question: str, kind: str
) -> None:
    assert answer_kinds.kind_of(answer, question) == kind


WORDS = (
    "LXIV listen AUG 0b1011 0o17 0x1F 1a2b 2b1a 2A3B B7 A1:B2 v1.2.3 192.168.0.1 3-1-2 555-0123"
    " Cmaj7 Qxf7 Fe2O3 C6H12O6 2024-W05 ACGTTG"
)
ROWS = (
    "e4 e5|R U R' U'|R U2 R'|C G Am F|A T G C|t e a|x1 y1|A4 B2|3R 2L|1 0 1 1|3 1 2|1101 0010"
    "|0b11 0b01|L R R L|N E S W|C# E G#|B 12|1st 2nd|101 202"
)


@pytest.mark.parametrize("answer", [*WORDS.split(), *ROWS.split("|")])
def test_no_other_order_of_letters_and_digits_is_a_code(answer: str) -> None:
    assert answer_kinds.judge(answer, f"The answer is {answer}.").right
    orders = set()
    for first, second in itertools.combinations(range(len(answer)), 2):
        characters = [*answer]
        characters[first] = answer[second]
        characters[second] = answer[first]
        orders.add("".join(characters))
    words = answer.split()
    orders |= {" ".join(order) for order in itertools.permutations(words)}
    same = _compared(answer)
    others = [order for order in orders if _compared(order) != same]
    assert others
    assert [order for order in others if answer_kinds.judge(answer, order).right] == []


def _compared(code: str) -> str:
    """Returns what two ways to write one code have in common."""
    return code.replace(" ", "").casefold()


@pytest.mark.parametrize(
    ("question", "is_right"),
    [
        ("Rank A, B and C from the smallest.", False),
        ("List them in ascending order.", False),
        ("In what order do they arrive?", False),
        ("Which of them hold, in any order?", True),
        ("", True),
    ],
)
def test_a_list_has_an_order_where_the_question_asks_for_one(
    question: str, is_right: bool
) -> None:
    assert answer_kinds.judge("B, A, C", "B, A and C", question).right
    assert answer_kinds.judge("B, A, C", "A, B, C", question).right == is_right


@pytest.mark.parametrize(
    ("reply", "phrases"),
    [
        ("<answer>7</answer>", ("7",)),
        (r"\boxed{6} and \boxed{7}", ("6, 7",)),
        (r"\boxed{7}. That is wrong. The answer is 8.", ("8",)),
        ("The answer is 7. Wait, it is 8.", ("Wait, it is 8.",)),
        ("It costs 5.\nSo it is 7.", ("So it is 7.", "It costs 5.")),
        ("We get\n\\[\n\\frac{3}{4}.\n\\]", ("\\[ \\frac{3}{4}\\]", "We get")),
    ],
)
def test_the_last_statement_of_a_reply_comes_first(
    reply: str, phrases: tuple[str, ...]
) -> None:
    assert final_statement(reply).phrases == phrases


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("one hundred and five", 105),
        ("two thousand three hundred forty-five", 2345),
        ("minus a quarter", -0.25),
        ("twenty-five percent", 0.25),
        ("3,5", 3.5),
        ("1 1/2", 1.5),
        ("twenty-fifth", None),
        ("one two", None),
        ("1 2", None),
        ("1e99999", None),
    ],
)
def test_a_number_is_read_in_digits_and_words(text: str, number: float | None) -> None:
    assert number_in(text) == number


@pytest.mark.parametrize(
    "formula",
    [
        "9^{9^{9^{9}}}",
        "(10^{12})!",
        r"\binom{10000000}{5000000}",
        r"\sum_{k=1}^{10^{9}} k",
        "(x + y)^{1000}",
        r"e^{10^{20}}",
        "+".join(["x"] * 1000),
        "7" * 2000,
    ],
)
def test_a_formula_that_would_cost_much_is_not_evaluated(formula: str) -> None:
    with pytest.raises(sizes.TooLarge):
        parsed(formula)
    assert not answer_kinds.judge("7", f"${formula}$").right
    assert not answer_kinds.judge("x + 1", rf"\boxed{{{formula}}}").right


@pytest.mark.parametrize(
    "formula",
    [
        "2^{2005} + 1",
        r"\frac{1}{2004!}",
        r"\binom{100}{50}",
        r"\sum_{k=1}^{100} k",
        "x^{99}",
    ],
)
def test_a_formula_of_a_usual_size_is_evaluated(formula: str) -> None:
    assert parsed(formula) is not None


@pytest.mark.process
async def test_answers_are_compared_in_a_program_beside_the_environment() -> None:
    judge = MathJudge(timeout_s=60.0)
    right = NOTHING | {"right": True, "readable": True}
    assert await judge.compare("1/2", "It is $0.5$.") == right
    assert await judge.compare("x^2 + 1", "$1 + x^2$") == right
    # A box is the answer however much follows it.
    assert (
        await judge.compare("7", r"\boxed{7}" + " I check: 1 + 1 = 2." * 1000) == right
    )
    assert (
        await judge.compare("(1, 2)", "1 < x < 2", "Where is (x - 1)(x - 2) < 0?")
        == right
    )
    assert not (await judge.compare("(1, 2)", "1 < x < 2", "Which point is it?"))[
        "right"
    ]
    assert await judge.compare("3", "4") == NOTHING | {"readable": True}
    assert await judge.compare("3", "no idea") == NOTHING
    judge._timeout_s = 0.5
    assert await judge.compare("x + 1", HARD) == NOTHING | {"judge_timeout": True}
    await judge.close()


@pytest.mark.process
async def test_comparisons_that_take_long_hold_up_no_other_one() -> None:
    judge = MathJudge(timeout_s=3600.0)
    places = judge._quick._value
    hard = [
        asyncio.create_task(judge.compare("x + 1", HARD)) for _ in range(places + 2)
    ]
    # All places are taken by comparisons that do not end.
    await until(
        lambda: judge._program is not None and len(comparisons_of(judge)) >= places
    )
    assert (await judge.compare("7", "7"))["right"]
    assert not any(task.done() for task in hard)
    # All end by themselves, and each is a fault of its own reply.
    await until(lambda: kill_comparisons(judge) or all(task.done() for task in hard))
    for task in hard:
        assert await task == NOTHING
    assert (await judge.compare("7", "7"))["right"]
    await judge.close()


def comparisons_of(judge: MathJudge) -> list[psutil.Process]:
    assert judge._program is not None
    return psutil.Process(judge._program.pid).children()


def kill_comparisons(judge: MathJudge) -> None:
    for process in comparisons_of(judge):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.process
async def test_a_program_that_somebody_ends_is_started_again() -> None:
    judge = MathJudge(timeout_s=60.0)
    assert (await judge.compare("7", "7"))["right"]
    program = judge._program
    assert program is not None
    psutil.Process(program.pid).kill()
    await until(lambda: program.has_ended)
    assert (await judge.compare("7", "7"))["right"]
    await judge.close()


@pytest.mark.process
async def test_a_comparison_that_is_given_up_while_the_program_starts_answers_no_other_one() -> (
    None
):
    judge = MathJudge(timeout_s=60.0)
    first = asyncio.create_task(judge.compare("1", "1"))
    await until(judge._starting.locked)
    first.cancel()
    await asyncio.wait([first])
    assert await judge.compare("3", "4") == NOTHING | {"readable": True}
    await judge.close()
