"""Decides how long new prompts wait, so that several are prefilled in one step.

A step with a prompt needs more than one CUDA graph, and costs a small model a third more time than
a step without. Requests begin and end all the time, so nearly every step would have a prompt. So
new prompts wait, to be prefilled together.
"""

# Number of running replies for each waiting prompt above which prompts wait. At most a 32nd of an
# engine's places is empty because of the wait, half of that on average.
REPLIES_PER_PROMPT = 32
# Largest number of steps that prompts wait in an engine with CUDA graphs.
MOST_STEPS = 32


class PromptGathering:
    """Decides whether prompts wait to be prefilled together; call `holds` before each step.

    If `holds` returns False, the step takes every prompt that is ready. No prompt is therefore
    held for more than `most_steps` steps.
    """

    def __init__(self, most_steps: int) -> None:
        """Sets the limit of the wait; with `most_steps` 0 no prompt waits."""
        self.most_steps = most_steps
        self.replies_per_prompt = REPLIES_PER_PROMPT
        self._num_steps = 0

    def holds(self, *, num_ready: int, num_replies: int) -> bool:
        """Returns whether prompts must wait in the step that is planned now; counts that step.

        `num_ready` prompts have room in that step. Without replies no prompt waits.
        """
        is_early = 0 < num_ready * self.replies_per_prompt < num_replies
        waits = is_early and self._num_steps < self.most_steps
        self._num_steps = self._num_steps + 1 if waits else 0
        return waits
