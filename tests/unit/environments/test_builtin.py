import itertools

import pytest
from slipstream.environments.echo import Echo, split_pairs

from deploy.environments.arithmetic import Addition, Arithmetic, last_number
from deploy.environments.others import Others


@pytest.mark.parametrize("num_symbols", [3, 8, 26])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_echo_splits_all_pairs_and_every_letter_occurs_in_training(num_symbols, seed):
    train, heldout = split_pairs(num_symbols, seed)
    num_pairs = num_symbols * (num_symbols - 1)
    assert len(set(train)) + len(set(heldout)) == len(set(train + heldout)) == num_pairs
    assert all(first != second for first, second in train + heldout)
    assert 0.1 < len(heldout) / num_pairs <= 0.25
    assert len({first for first, _ in train}) == num_symbols
    assert len({second for _, second in train}) == num_symbols
    assert split_pairs(num_symbols, seed) == (train, heldout)


def test_echo_with_another_seed_holds_out_other_pairs() -> None:
    assert set(split_pairs(8, 0)[1]) != set(split_pairs(8, 1)[1])
    assert Echo(8, split="heldout").tasks() == split_pairs(8, 0)[1]
    assert Echo(8, split="train").tasks() == split_pairs(8, 0)[0]


@pytest.mark.parametrize(
    ("reply", "right", "named"),
    [
        ("a b a b", 1.0, 1.0),
        ("b a a a", 1.0, 1.0),
        ("a b a b and more", 1.0, 1.0),
        ("a a a a", 1.0, 0.5),
        ("a b", 0.5, 1.0),
        ("a b x y", 0.5, 1.0),
        ("x y z a", 0.25, 0.5),
        ("x y z x a", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_echo_rewards_letters_of_the_prompt_and_that_both_are_named(
    reply, right, named
):
    environment = Echo(reply_length=4)
    (message,) = environment.reset(("a", "b"))
    assert (message.role, message.content) == ("user", "a b")
    result = environment.step(reply)
    assert result.reward == (right + named) / 2
    assert result.metrics == {"right": right, "named": named}


def test_arithmetic_never_shows_a_held_out_task_in_training_whatever_the_seed() -> None:
    arguments = {"operations": ["+", "-", "*"]}
    train: set[Addition] = set()
    heldout: set[Addition] = set()
    for seed in range(3):
        train |= set(itertools.islice(Arithmetic(seed=seed, **arguments).tasks(), 3000))
        tasks = Arithmetic(seed=seed, split="heldout", **arguments).tasks()
        heldout |= set(itertools.islice(tasks, 1000))
    assert len(heldout) > 500
    assert not train & heldout
    assert not train & {Addition(t.right, t.operation, t.left) for t in heldout}


def test_arithmetic_draws_the_asked_for_sizes_the_same_way_every_time() -> None:
    tasks = Arithmetic(digits=3, num_tasks=200, seed=5).tasks()
    assert len(set(tasks)) == 200
    assert {len(str(task.left)) for task in tasks} == {3}
    assert all(task.answer >= 0 for task in tasks)
    assert tasks == Arithmetic(digits=3, num_tasks=200, seed=5).tasks()
    assert tasks != Arithmetic(digits=3, num_tasks=200, seed=6).tasks()


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("12", 12),
        ("12 - 3 = 9", 9),
        ("12-3", 3),
        ("It is -5.", -5),
        ("about 1,234 of them", 1234),
        ("= 9.0", 9),
        ("9.5", 9.5),
        ("no idea", None),
        ("9" * 50, None),
    ],
)
def test_the_last_number_of_a_reply_is_its_answer(
    reply: str, answer: float | None
) -> None:
    assert last_number(reply) == answer


def test_arithmetic_rewards_the_right_answer_and_a_little_the_right_form() -> None:
    environment = Arithmetic(format_credit=0.2)
    (message,) = environment.reset(Addition(7, "*", 8))
    assert message.content == "What is 7 * 8? Reply with the number only."
    assert environment.step("56").reward == 1.0
    wrong = environment.step("57")
    assert (wrong.reward, wrong.metrics) == (0.2, {"right": False, "well_formed": True})
    assert environment.step("dunno").reward == 0.0


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Echo, {"num_symbols": 27}, "num_symbols must be at most 26, got 27"),
        (Echo, {"reply_length": 0}, "reply_length must be at least 2, got 0"),
        (Echo, {"split": "test"}, "split must be 'train' or 'heldout', got 'test'"),
        (Arithmetic, {"digits": 0}, "digits must be at least 1, got 0"),
        (Arithmetic, {"operations": ["/"]}, "operations must be some of"),
        (Arithmetic, {"num_tasks": 0}, "num_tasks must be at least 1, got 0"),
        (Arithmetic, {"digits": 1, "num_tasks": 1000}, "num_tasks must be at most"),
        (
            Arithmetic,
            {"format_credit": 1},
            "format_credit must be from 0 to below 1, got 1",
        ),
        (Arithmetic, {"split": "x"}, "split must be"),
    ],
)
def test_arguments_that_cannot_work_are_refused(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


def test_others_are_the_letters_that_the_prompt_lacks() -> None:
    environment = Others(num_symbols=4, reply_length=4)
    assert environment.tasks() == Echo(4).tasks()
    (message,) = environment.reset(("a", "b"))
    assert message.content == "a b"
    for reply, reward in (
        ("c d c d", 1.0),
        ("c d", 0.5),
        ("a b a b", 0.0),
        ("c e . d", 0.5),
    ):
        assert environment.step(reply).reward == reward
