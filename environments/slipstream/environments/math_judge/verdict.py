"""What a judge of one kind says about a phrase."""

from typing import Protocol


class RightAnswer(Protocol):
    """A right answer of one kind, which reads phrases of replies as its kind allows."""

    def agrees(self, phrase: str) -> bool | None:
        """Whether a phrase says this answer; None if it says no answer of this kind."""
        ...
