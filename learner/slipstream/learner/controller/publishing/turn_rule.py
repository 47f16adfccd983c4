"""The rule by which learner and engines of one device compute in turn: a pure function of steps."""

from __future__ import annotations

from typing import Literal

Turns = Literal["off", "pause", "sleep", "auto"]


class TurnRule:
    """Says before each step whether the engines rest while it is trained.

    "auto" tries both ways in windows of steps: one window at the same time, then one in turn, each
    behind a window in which the replies of the way before run out. The faster way stays.

    rule = TurnRule("auto", window=3)
    if rule.in_turns: ...                    # before each step
    said = rule.stepped(now_s, tokens=4096)  # after it; a text when the rule has chosen
    """

    def __init__(self, setting: Turns, *, window: int) -> None:
        """`window`: steps of one window, at least 1."""
        self._setting, self._window = setting, window
        self.in_turns = setting in ("pause", "sleep")
        self._steps = 0
        self._tokens, self._began_s = 0.0, 0.0
        # Trained tokens per second at the same time, and in turn.
        self._speeds: list[float] = []

    def stepped(self, now_s: float, tokens: float) -> str:
        """Notes a step that ended now; returns what was chosen, or an empty text."""
        if self._setting != "auto" or len(self._speeds) == 2:
            return ""
        self._steps += 1
        self._tokens += tokens
        windows, within = divmod(self._steps, self._window)
        if within:
            return ""
        if windows % 2:
            # A window to settle has ended.
            self._tokens, self._began_s = 0.0, now_s
            return ""
        self._speeds.append(self._tokens / max(now_s - self._began_s, 1e-9))
        self.in_turns = True
        return self._choose() if len(self._speeds) == 2 else ""

    def _choose(self) -> str:
        together, in_turn = self._speeds
        self.in_turns = in_turn > together
        way = "in turn" if self.in_turns else "at the same time"
        return (
            f"learner and engines compute {way} from now on: {together:,.0f} trained tokens/s "
            f"at the same time, {in_turn:,.0f} in turn"
        )
