"""Lets new prompts wait for each other, so that most steps only continue replies.

A step with a prompt needs more than one CUDA graph, and costs a small model a third more time than
a step without. Requests begin and end all the time, so that nearly every step would have a prompt.
"""

from __future__ import annotations

# Number of running replies for each waiting prompt above which prompts wait. At most a 32nd of an
# engine's places is empty because of the wait, half of that on average.
REPLIES_PER_PROMPT = 32
# Largest number of steps that prompts wait on GPUs if `debug.prompt_wait_steps` is unset.
MOST_STEPS = 32


def prompts_wait(
    *,
    num_ready: int,
    num_replies: int,
    num_steps: int,
    most_steps: int,
    replies_per_prompt: int = REPLIES_PER_PROMPT,
) -> bool:
    """Whether the next step takes none of the `num_ready` prompts, although it has room for them.

    `num_steps`: steps that the first of them has waited. No prompt waits in an engine without
    replies.
    """
    return num_steps < most_steps and 0 < num_ready * replies_per_prompt < num_replies


class PromptGathering:
    """Counts the steps for which prompts wait; callers ask `holds` before each step.

    If `holds` is false, the step takes every prompt that is ready. No prompt is therefore held for
    more than `most_steps` steps.
    """

    def __init__(self, most_steps: int, *, replies_per_prompt: int = REPLIES_PER_PROMPT) -> None:
        """Sets the limits of the wait; with `most_steps` 0 no prompt waits."""
        self.most_steps, self.replies_per_prompt = most_steps, replies_per_prompt
        self._num_steps = 0

    def holds(self, *, num_ready: int, num_replies: int) -> bool:
        """Whether prompts must wait in the step that is planned now; counts that step."""
        waits = prompts_wait(
            num_ready=num_ready,
            num_replies=num_replies,
            num_steps=self._num_steps,
            most_steps=self.most_steps,
            replies_per_prompt=self.replies_per_prompt,
        )
        self._num_steps = self._num_steps + 1 if waits else 0
        return waits
