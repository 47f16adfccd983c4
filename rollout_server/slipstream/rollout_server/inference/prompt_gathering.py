"""New prompts wait for each other, so that most steps do nothing but go on with replies.

A step with a prompt in it is more than one CUDA graph, and costs a small model a third more than a
step without. Where requests end and begin all the time nearly every step would have one.
"""

from __future__ import annotations

# So many replies are under way for each prompt that waits before a step takes the prompts: at most
# a 32nd of an engine's places is empty for the sake of the others, half of that on average.
REPLIES_PER_PROMPT = 32
# Steps of waiting at the most where `rollout_server.prompt_wait_steps` is left out, on GPUs.
MOST_STEPS = 32


def prompts_wait(
    *,
    num_ready: int,
    num_replies: int,
    num_steps: int,
    most_steps: int,
    replies_per_prompt: int = REPLIES_PER_PROMPT,
) -> bool:
    """The next step takes none of `num_ready` prompts, which could have a place in it.

    They have waited for `num_steps`, the first of them. Nothing waits in an engine without replies.
    """
    return num_steps < most_steps and 0 < num_ready * replies_per_prompt < num_replies


class PromptGathering:
    """Counts the steps for which prompts wait: `holds` is asked before each step.

    A step that is not held takes every prompt that is ready, so that no prompt is held in more than
    `most_steps` steps.
    """

    def __init__(self, most_steps: int, *, replies_per_prompt: int = REPLIES_PER_PROMPT) -> None:
        """`most_steps` of 0: no prompt waits."""
        self.most_steps, self.replies_per_prompt = most_steps, replies_per_prompt
        self._num_steps = 0

    def holds(self, *, num_ready: int, num_replies: int) -> bool:
        """Whether the prompts stay where they are in the step that is planned now."""
        waits = prompts_wait(
            num_ready=num_ready,
            num_replies=num_replies,
            num_steps=self._num_steps,
            most_steps=self.most_steps,
            replies_per_prompt=self.replies_per_prompt,
        )
        self._num_steps = self._num_steps + 1 if waits else 0
        return waits
