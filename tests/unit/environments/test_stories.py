import pytest

from deploy.environments.stories import NAMES, SUBJECTS, Stories


def told(*sentences: str) -> str:
    return " ".join(sentences)


RIGHT = [f"Anna met a friend in street {number}." for number in range(10)]


def test_each_name_gets_each_subject_once_and_in_the_same_order() -> None:
    tasks = Stories().tasks()
    assert tasks == Stories().tasks()
    assert (
        len(tasks) == len({tuple(task) for task in tasks}) == len(NAMES) * len(SUBJECTS)
    )


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (told(*RIGHT), 1.0),
        (told(*RIGHT[:4]), 0.4),
        ("Anna, the youngest of all, met a friend!", 0.1),
        # Told twice, of another name, too short, without an end.
        (told(RIGHT[0], RIGHT[0]), 0.1),
        ("Ben met a friend in the street.", 0.0),
        ("Anna met a friend.", 0.0),
        ("Anna met a friend in the street", 0.0),
        ("", 0.0),
        # Ten of twenty.
        (told(*RIGHT, *["There was no more to tell."] * 10), 0.5),
    ],
)
def test_the_reward_is_the_share_of_sentences_that_begin_with_the_name(
    reply: str, reward: float
) -> None:
    environment = Stories()
    (message,) = environment.reset(["Anna", "the sea"])
    assert message["content"].startswith(
        "Write a story of ten sentences about the sea."
    )
    assert environment.step(reply).reward == pytest.approx(reward)
