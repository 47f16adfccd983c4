"""Tables of batches and versions are as dictionaries of them, also from their stored form."""

import random

import pytest
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.records.recorded_steps import (
    BatchTable,
    JournaledStep,
    RecordedBatch,
    StepTable,
    attempt_of,
    batch_name,
)

DIGEST = "00112233445566778899aabbccddeeff"


def drawn_batch(step: int) -> RecordedBatch:
    name = batch_name(step, random.randrange(3))
    other_name = random.choice([name, name, f"b{step}", "x"])
    return RecordedBatch(
        step, other_name, random.randrange(2**32), random.randrange(2**40)
    )


def drawn_step(step: int) -> JournaledStep:
    digest = random.choice(
        [f"{random.randrange(2**128):032x}", "", "ab", DIGEST.upper()]
    )
    return JournaledStep(PolicyVersion(random.randrange(4), step + 1), digest)


@pytest.mark.parametrize(
    ("kind", "drawn"), [(BatchTable, drawn_batch), (StepTable, drawn_step)]
)
def test_a_table_is_as_a_dictionary(kind, drawn) -> None:
    random.seed(5)
    table = kind()
    expected: dict = {}
    for _ in range(2000):
        step = random.randrange(40)
        if random.random() < 0.7:
            table[step] = expected[step] = drawn(step)
        elif step in expected:
            del table[step], expected[step]
        else:
            with pytest.raises(KeyError):
                del table[step]
        assert len(table) == len(expected)
        assert table.get(step) == expected.get(step)
    assert dict(table) == dict(sorted(expected.items()))
    again = kind.restored(table.stored())
    assert again == table == expected
    again[3] = drawn(3)
    del table[max(expected)]
    assert max(expected) in again


def test_a_copy_of_the_batches_keeps_its_content() -> None:
    table = BatchTable()
    table[0] = batch = RecordedBatch(0, "b000000", 7, 9)
    copy = table.copy()
    del table[0]
    assert dict(copy) == {0: batch}


def test_numbers_that_no_journal_has_are_refused() -> None:
    with pytest.raises(OverflowError):
        BatchTable()[0] = RecordedBatch(0, "b000000", 2**70)


def test_an_attempt_is_in_the_name_of_its_batch() -> None:
    assert [batch_name(7, 0), batch_name(7, 2)] == ["b000007", "b000007-2"]
    assert [attempt_of("b000007"), attempt_of("b000007-2"), attempt_of("x-y")] == [
        0,
        2,
        0,
    ]
