"""Where drafts on GPUs come from; the same code runs here on the CPU."""

import random

import pytest

torch = pytest.importorskip("torch")

from slipstream.rollout_server.inference.draft_table import RUNS, DraftTable  # noqa: E402

LONG, SHORT, _ = RUNS
LENGTH = 4
TEXT = random.Random(1).sample(range(1000, 9000), 60)


class Texts:
    """Some texts that grow, and the table that knows them."""

    def __init__(self, num_texts: int = 3, **options: int) -> None:
        self.table = DraftTable(LENGTH, **{"slots": 1 << 12, **options})
        self.tokens = torch.zeros(num_texts, 100, dtype=torch.int32)
        self.ends = [0] * num_texts

    def grow(self, text: int, tokens: list[int]) -> None:
        """Appends tokens, and enters all places that have a whole draft behind them since then."""
        old, new = self.ends[text], self.ends[text] + len(tokens)
        self.tokens[text, old:new] = torch.tensor(tokens)
        self.ends[text] = new
        places = torch.arange(old - LENGTH + 1, new - LENGTH + 1)
        self.table.enter(self.tokens, torch.full_like(places, text), places, places >= 0)

    def draft(self, text: int) -> list[int]:
        """The draft behind a text."""
        ends = torch.tensor([self.ends[text]])
        return self.table.draft(self.tokens, torch.tensor([text]), ends)[0].tolist()


@pytest.mark.parametrize("run", RUNS)
def test_a_text_finds_what_it_said_before(run: int) -> None:
    texts = Texts()
    texts.grow(0, [*TEXT[:30], 7, *TEXT[10 : 10 + run]])
    assert texts.draft(0) == TEXT[10 + run : 14 + run]


def test_a_text_finds_what_another_says_that_is_a_draft_ahead() -> None:
    texts = Texts()
    texts.grow(0, [5, *TEXT[:10]])
    texts.grow(1, [6, *TEXT[:6]])
    assert texts.draft(1) == TEXT[6:10]


def test_texts_that_advance_together_find_what_was_said_before_them() -> None:
    texts = Texts()
    texts.grow(0, TEXT)
    for place in range(40):
        for text in (1, 2):
            texts.grow(text, [TEXT[place]])
            assert texts.draft(text) == TEXT[place + 1 : place + 5]


def test_the_longest_run_counts_and_then_the_newest() -> None:
    texts = Texts()
    texts.grow(0, [*TEXT[:LONG], 1, 2, 3, 4])
    texts.grow(1, [9, *TEXT[LONG - SHORT : LONG], 5, 6, 7, 8])
    texts.grow(2, TEXT[:LONG])
    assert texts.draft(2) == [1, 2, 3, 4]
    other = Texts()
    other.grow(0, [1, *TEXT[LONG - SHORT : LONG], 1, 2, 3, 4])
    other.grow(1, [9, *TEXT[LONG - SHORT : LONG], 5, 6, 7, 8])
    other.grow(2, TEXT[:LONG])
    assert other.draft(2) == [5, 6, 7, 8]


def test_a_run_is_no_longer_than_its_text() -> None:
    texts = Texts()
    # The columns before the text hold another one's tokens.
    texts.grow(0, [*TEXT[:20]])
    texts.grow(1, [TEXT[12]])
    assert texts.draft(1) == TEXT[13:17]


def test_the_last_token_is_repeated_where_nothing_is_known() -> None:
    texts = Texts()
    texts.grow(0, TEXT[:20])
    texts.grow(1, [TEXT[3], 17])
    assert texts.draft(1) == [17] * LENGTH


def test_places_that_do_not_count_are_not_entered() -> None:
    texts = Texts()
    texts.tokens[0, :20] = torch.tensor(TEXT[:20])
    places = torch.tensor([5, 6])
    texts.table.enter(texts.tokens, torch.zeros(2).long(), places, torch.tensor([True, False]))
    for count, expected in ((5, TEXT[5:9]), (6, [TEXT[5]] * LENGTH)):
        texts.tokens[1, :count] = texts.tokens[0, :count]
        texts.ends[1] = count
        assert texts.draft(1) == expected


def test_a_full_table_gives_whole_drafts_of_known_texts_or_none() -> None:
    texts = Texts(2, slots=16)
    chosen = random.Random(3)
    for _ in range(40):
        texts.ends = [0, 0]
        texts.grow(0, TEXT)
        start = chosen.randrange(1, 50)
        texts.grow(1, TEXT[start - 1 : start + 1])
        assert texts.draft(1) in (TEXT[start + 1 : start + 5], [TEXT[start]] * LENGTH)
