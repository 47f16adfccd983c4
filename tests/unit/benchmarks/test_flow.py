"""The steady flow of benchmarks/rollout/flow.py: lengths, what is counted, and the table."""

import statistics

from benchmarks.rollout.engines import Turn, reply_tokens
from benchmarks.rollout.flow import ROUND, WAVE, table_of
from benchmarks.rollout.flow_engine import LEVERS, Board


def test_a_flow_begins_in_the_middle_of_replies() -> None:
    turn = Turn(1000, 4000, 2000, 256, 768, staggered=True)
    lengths = [reply_tokens(seed, turn) for seed in range(1000, 5000)]
    first_lengths = lengths[:2000]
    later_lengths = lengths[2000:]
    assert min(first_lengths) < 20
    assert max(lengths) <= 768
    assert min(later_lengths) >= 256
    # The rest of a reply that is found under way: E[n * n] / (2 * E[n]).
    assert abs(statistics.mean(first_lengths) - 277) < 15
    assert abs(statistics.mean(later_lengths) - 512) < 15
    unstaggered = Turn(1000, 4000, 2000, 256, 768)
    assert [
        reply_tokens(seed, unstaggered) for seed in range(3000, 5000)
    ] == later_lengths


def test_a_board_tells_what_was_counted_since_a_copy() -> None:
    board = Board()
    board.set_lever("wait-32-16-vllms-plans")
    assert board.lever == [32, 16, 0]
    board.count(1, "steps", 1)
    board.first_token(9.0)
    before = board.values.copy()
    board.count(0, "steps", 3)
    board.count(1, "FULL", 2)
    for seconds in (0.1, 0.2, 0.3):
        board.first_token(seconds)
    flow = board.since(before)
    assert flow["decoding"]["steps"] == 3
    assert flow["prompts"] == {**dict.fromkeys(flow["prompts"], 0), "FULL": 2}
    assert flow["first_token_s"]["number"] == 3
    assert flow["first_token_s"]["p50"] == 0.2


def test_the_table_compares_with_the_wave() -> None:
    kind = dict.fromkeys(("plan", "start", "sample", "take"), 0.25)
    kind |= {"steps": 100, "whole": 1.0, "tokens": 0, "replies": 50_000}
    graphs = {"NONE": 0, "PIECEWISE": 0, "FULL": 100}
    nothing = dict.fromkeys((*kind, *graphs), 0)
    turn = {"window_s": 1.0, "decoding": kind | graphs, "prompts": nothing}
    turns = {
        WAVE: [turn | {"tokens": 50_000}],
        "flow": [turn | {"tokens": 48_000, "first_token_s": {"p50": 0.1, "p99": 0.3}}],
    }
    assert table_of(turns)[3] == (
        "| flow | 48,000 (48,000-48,000) | 0.960 | 0.00 | 1.00, 0.00, 0.00 | 500 | 10.00 "
        "| 10.0, - | 100, 300 |"
    )


def test_every_lever_of_a_round_can_be_set() -> None:
    assert {lever for _, lever, _ in ROUND} <= LEVERS.keys()
