"""Branches hold exactly what the model read and sampled, however calls of an agent interleave."""

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.types import PolicyVersion, VersionSpan
from slipstream.rollout_server.agents.conversations import (
    AgentCall,
    AgentTurn,
    Conversations,
    MessageKey,
)
from slipstream.rollout_server.engine_interface import FinishReason, Generation
from support.rigs.fuzz_budget import times

TOOLS = "tools"


def key(role: str, text: str) -> MessageKey:
    return MessageKey("system" if text == "s" else role, text)


def generation(tokens: list[int]) -> Generation:
    return Generation(
        np.asarray(tokens, dtype=np.uint32),
        -np.asarray(tokens, dtype=np.float32),
        (VersionSpan(len(tokens), PolicyVersion(0, tokens[0] % 5)),) if tokens else (),
        FinishReason.STOP,
    )


class Talk:
    """Conversations whose messages are single tokens, which makes a prompt easy to check."""

    def __init__(self) -> None:
        self.all = Conversations()
        self.numbers = itertools.count(1000)
        # The token of each text.
        self.tokens: dict[str, int] = {}

    def ask(self, *texts, name="", tools=TOOLS):
        keys = [
            key("assistant" if text.startswith("r") else "user", text) for text in texts
        ]
        turn_found = self.all.find(tools, keys, name)
        rest = keys[turn_found.num_messages :] if turn_found else keys
        context = [self.tokens.setdefault(key.text, len(self.tokens)) for key in rest]
        return self.all.begin(
            name, turn_found.turn if turn_found else None, context
        ), keys

    def reply(self, call, keys, text, *, tools=TOOLS):
        turn = self.all.finish(
            call, generation([next(self.numbers), next(self.numbers)])
        )
        assert turn is not None
        self.all.remember(turn, tools, keys, [key("assistant", text)])
        return turn

    def talk(
        self, *texts: str, reply: str, name: str = "", tools: str = TOOLS
    ) -> AgentTurn:
        call, keys = self.ask(*texts, name=name, tools=tools)
        return self.reply(call, keys, reply, tools=tools)


def test_a_second_turn_is_appended() -> None:
    talk = Talk()
    talk.talk("u1", reply="r1")
    call, _ = talk.ask("u1", "r1", "u2")
    (branch,) = talk.all.branches
    assert call.branch is branch
    assert call.prompt == branch.token_ids + call.context
    assert len(call.context) == 1


def test_an_earlier_state_begins_a_branch_with_the_exact_tokens() -> None:
    talk = Talk()
    first = talk.talk("u1", reply="r1")
    before = list(first.branch.token_ids)
    talk.talk("u1", "r1", "u2", reply="r2")
    talk.talk("u1", "r1", "u3", reply="r3")
    old, new = talk.all.branches
    assert new.token_ids[: len(before)] == before
    assert (len(old.run_lengths), len(new.run_lengths)) == (4, 2)
    assert new.run_lengths == [len(before) + 1, 2]


def test_a_state_that_another_call_continues_begins_a_branch() -> None:
    talk = Talk()
    talk.talk("u1", reply="r1")
    first_turn, keys = talk.ask("u1", "r1", "u2")
    other, other_keys = talk.ask("u1", "r1", "u3")
    assert first_turn.is_append
    assert not other.is_append
    talk.reply(other, other_keys, "r3")
    talk.reply(first_turn, keys, "r2")
    assert [len(branch.run_lengths) for branch in talk.all.branches] == [4, 2]


def test_an_edited_history_and_other_tools_begin_a_branch_from_the_start() -> None:
    talk = Talk()
    talk.talk("u1", reply="r1")
    assert len(talk.ask("u1", "r-edited", "u2")[0].prompt) == 3
    assert len(talk.ask("u-edited", "r1", "u2")[0].prompt) == 3
    assert len(talk.ask("u1", "r1", "u2", tools="others")[0].prompt) == 3
    assert all(not call.is_append for call in [talk.ask("r1", "u2")[0]])


def test_the_same_messages_once_more_are_another_sample() -> None:
    talk = Talk()
    talk.talk("u1", reply="r1")
    again, _ = talk.ask("u1")
    assert not again.is_append
    assert len(again.prompt) == 1


def test_the_turn_that_a_request_names_goes_on_among_equal_ones() -> None:
    talk = Talk()
    turns = [talk.talk("u1", reply="r1") for _ in range(2)]
    keys = [key("user", "u1"), key("assistant", "r1"), key("user", "u2")]
    for turn in turns:
        turn_found = talk.all.find(TOOLS, keys, "", previous=turn)
        assert (turn_found.turn, turn_found.num_messages) == (turn, 2)
    # A turn that its messages do not continue is no matter.
    assert (
        talk.all.find(TOOLS, [key("user", "x"), *keys], "", previous=turns[0]) is None
    )


def test_a_name_has_branches_of_its_own_which_may_begin_with_tokens_of_others() -> None:
    talk = Talk()
    talk.talk("u1", reply="r1")
    turn = talk.talk("u1", "r1", "u2", reply="r2", name="reviewer")
    assert turn.branch.name == "reviewer"
    assert turn.branch.token_ids[:3] == talk.all.branches[0].token_ids
    assert talk.ask("u1", "r1", "u2", "r2", "u3", name="reviewer")[0].is_append


def test_a_call_that_samples_nothing_leaves_no_trace() -> None:
    talk = Talk()
    talk.talk("u1", reply="r1")
    call, _ = talk.ask("u1", "r1", "u2")
    new, _ = talk.ask("u9")
    assert talk.all.finish(call, None) is None
    assert talk.all.finish(new, generation([])) is None
    (branch,) = talk.all.branches
    assert branch.run_lengths == [1, 2]
    assert talk.ask("u1", "r1", "u2")[0].is_append


def test_replies_of_equal_text_are_told_apart_by_their_reasoning() -> None:
    talk = Talk()
    turns = []
    for reasoning in ("one", "two"):
        call, keys = talk.ask("u1")
        turn = talk.all.finish(call, generation([next(talk.numbers)]))
        whole = MessageKey("assistant", "r1", reasoning=reasoning)
        talk.all.remember(turn, TOOLS, keys, [whole, whole._replace(reasoning=None)])
        turns.append(turn)
    for turn, reasoning in zip(turns, ("one", "two"), strict=True):
        keys = [key("user", "u1"), MessageKey("assistant", "r1", reasoning=reasoning)]
        assert talk.all.find(TOOLS, [*keys, key("user", "u2")], "").turn is turn


@dataclass
class _Known:
    texts: tuple[str, ...]
    tokens: list[int]


@settings(max_examples=times(200))
@given(st.data())
def test_recorded_tokens_are_those_that_were_sampled_for_any_interleaving(data) -> None:
    talk = Talk()
    entries = [_Known((), [])]
    sampled = {}
    open_calls: list[tuple[AgentCall, list[MessageKey], tuple[str, ...]]] = []
    for number in range(data.draw(st.integers(1, 25))):
        if open_calls and data.draw(st.booleans()):
            call, keys, texts = open_calls.pop(
                data.draw(st.integers(0, len(open_calls) - 1))
            )
            count = data.draw(st.integers(0, 3))
            tokens = [next(talk.numbers) for _ in range(count)]
            turn = talk.all.finish(call, generation(tokens))
            assert (turn is None) == (count == 0)
            if turn is not None:
                sampled[tuple(call.prompt)] = sampled.get(tuple(call.prompt), []) + [
                    tokens
                ]
                talk.all.remember(turn, TOOLS, keys, [key("assistant", f"r{number}")])
                entries.append(_Known((*texts, f"r{number}"), call.prompt + tokens))
            continue
        start = data.draw(st.sampled_from(entries))
        name = data.draw(st.sampled_from(["", "a"]))
        texts = (*start.texts, f"u{data.draw(st.integers(0, 2))}")
        call, keys = talk.ask(*texts, name=name)
        # The prompt begins with the tokens of the state that it continues.
        assert call.prompt[: len(start.tokens)] == start.tokens
        assert len(call.prompt) == len(start.tokens) + 1
        open_calls.append((call, keys, texts))
    recorded: dict[tuple[int, ...], list[list[int]]] = {}
    for branch in talk.all.branches:
        assert len(branch.run_lengths) % 2 == 0
        assert sum(branch.run_lengths) == len(branch.token_ids)
        ends = list(itertools.accumulate(branch.run_lengths))
        logprobs = np.concatenate(
            [reply["behavior_logprobs"] for reply in branch.sampled]
        ).tolist()
        of_branch = []
        for start, end in zip(ends[::2], ends[1::2], strict=True):
            prompt = tuple(branch.token_ids[:start])
            tokens = branch.token_ids[start:end]
            recorded[prompt] = recorded.get(prompt, []) + [tokens]
            of_branch += tokens
        assert logprobs == [-token for token in of_branch]
        assert sum(span.length for span in branch.spans) == len(of_branch)
    assert {k: sorted(v) for k, v in recorded.items()} == {
        k: sorted(v) for k, v in sampled.items()
    }
    turns = sum(len(branch.sampled) for branch in talk.all.branches)
    assert turns == sum(map(len, sampled.values()))
