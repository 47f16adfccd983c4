"""How pauses between attempts grow."""

from slipstream.core.backoff import Backoff


def test_pauses_double_up_to_the_limit_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert backoff.is_fresh
    assert [backoff.take_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert not backoff.is_fresh
    backoff.reset()
    assert backoff.is_fresh
    assert backoff.take_s() == 0.5
