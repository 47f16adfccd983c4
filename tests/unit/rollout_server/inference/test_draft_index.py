"""Where drafts come from."""

from __future__ import annotations

import random

from slipstream.rollout_server.inference.draft_index import RUNS, DraftIndex

LONG, SHORT = RUNS
TEXT = random.Random(1).sample(range(1000, 9000), 60)


def index(**options: int) -> DraftIndex:
    return DraftIndex(4, slots=1 << 16, **options)


def grow(found: DraftIndex, name: str, tokens: list[int], num_prompt: int = 1) -> list[int]:
    """The draft behind the last token of a text that grew token by token."""
    text: list[int] = list(tokens[:num_prompt])
    draft: list[int] = []
    for token in tokens[num_prompt:]:
        text.append(token)
        draft = found.draft(name, text, num_prompt=num_prompt, most=4)
    return draft


def test_a_reply_finds_what_it_said_before() -> None:
    assert grow(index(), "a", [*TEXT[:20], *TEXT[5:9]]) == TEXT[9:13]


def test_a_reply_finds_what_its_prompt_says() -> None:
    assert grow(index(), "a", [*TEXT[:20], 7, *TEXT[5:9]], num_prompt=20) == TEXT[9:13]


def test_a_member_finds_what_another_says_that_is_a_draft_ahead() -> None:
    found = index()
    prompt = [1, 2, 3]
    first, second = [*prompt, *TEXT[:10]], [*prompt, *TEXT[:6]]
    found.draft("a", first, num_prompt=3, most=4)
    assert found.draft("b", second, num_prompt=3, most=4) == TEXT[6:10]
    assert found.draft("c", first, num_prompt=3, most=4) == []


def test_members_that_advance_together_find_what_was_said_before_them() -> None:
    found = index()
    grow(found, "old", [9, *TEXT])
    found.close("old")
    texts: dict[str, list[int]] = {"a": [1], "b": [1]}
    for place, token in enumerate(TEXT[:40]):
        for name, text in texts.items():
            text.append(token)
            draft = found.draft(name, text, num_prompt=1, most=4)
            if place + 1 >= SHORT:
                assert draft == TEXT[place + 1 : place + 5]


def test_a_draft_is_no_longer_than_asked_for() -> None:
    found = index()
    grow(found, "old", [9, *TEXT])
    assert found.draft("a", [1, *TEXT[:6]], num_prompt=1, most=2) == TEXT[6:8]


def test_the_longest_run_counts_and_of_equal_ones_the_newest() -> None:
    found = index()
    run = TEXT[:LONG]
    for number, (text, following) in enumerate(
        [(run, [1, 2, 3, 4, 5]), (run, [6, 7, 8, 9, 10]), (run[-SHORT:], [11, 12, 13, 14, 15])]
    ):
        grow(found, f"old{number}", [20 + number, *text, *following])
        found.close(f"old{number}")
    assert grow(found, "a", [30, *run]) == [6, 7, 8, 9]
    assert grow(found, "b", [31, *run[-SHORT:]]) == [11, 12, 13, 14]


def test_the_end_of_an_ended_reply_is_found_too() -> None:
    found = index()
    grow(found, "old", [9, *TEXT[:20]])
    found.close("old")
    assert grow(found, "a", [1, *TEXT[:18]]) == TEXT[18:20]


def test_the_oldest_texts_go_first() -> None:
    found = index(most_tokens=130)
    for name in ("first", "second", "third"):
        tokens = [ord(name[0]), *(place + 10 * ord(name[0]) for place in range(59))]
        grow(found, name, tokens)
        found.close(name)

    def known(name: str) -> bool:
        start = 10 * ord(name[0])
        return bool(grow(found, f"a-{name}", [1, *range(start + 10, start + 20)]))

    assert [known(name) for name in ("first", "second", "third")] == [False, True, True]


def test_a_prompt_is_entered_again_once_its_text_is_gone() -> None:
    found = index(most_tokens=70)
    prompt = TEXT[:40]
    for name in ("first", "second"):
        # The reply repeats the prompt from its tenth token on.
        assert grow(found, name, [*prompt, *prompt[10:20]], num_prompt=40) == prompt[20:24]
        found.close(name)


def test_a_slot_that_another_run_took_gives_no_draft() -> None:
    found = DraftIndex(4, slots=1)
    grow(found, "old", [9, *TEXT])
    assert grow(found, "a", [1, *TEXT[:10]]) == []


def test_what_never_drafted_can_be_closed() -> None:
    index().close("unknown")
