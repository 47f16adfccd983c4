"""The work of whole systems as an agent loop and a reward function of verl.

The loop is verl's own for one turn. Only its replies get the lengths of the work, and the first one
waits for the gate.
"""

# ruff: noqa: ANN401, D102 - verl tells no types; names of methods are its own.

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Any

from benchmarks.whole_systems.work import Work, reward

# The files by which verl.py and compare.py lead this system. Several processes draw lengths.
ASKED = "WHOLE_SYSTEMS_ASKED"
GATE = "WHOLE_SYSTEMS_GATE"
COUNTER = "WHOLE_SYSTEMS_COUNTER"


def next_place() -> int:
    """Returns how many replies were drawn before by all processes."""
    with Path(os.environ[COUNTER]).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        place = int(file.read())
        file.seek(0)
        file.write(str(place + 1))
    return place


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """Returns the reward of a reply, as verl asks for it."""
    return reward(solution_str)


def __getattr__(name: str) -> Any:
    """Makes the loop when verl asks for it by name: this module is read without verl too."""
    if name != "OneCall":
        raise AttributeError(name)
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    class OneCall(SingleTurnAgentLoop):  # type: ignore[misc]
        def __init__(self, *args: Any, **named: Any) -> None:
            # The tokenizer of the work has words alone, and not the marks of a Qwen3's turns.
            super().__init__(*args, **{**named, "hf_model_type": None})

        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            length = Work.of_environ().length(next_place())
            if ASKED in os.environ:
                Path(os.environ[ASKED]).touch()
                while not Path(os.environ[GATE]).exists():
                    await asyncio.sleep(0.1)
            forced = {**sampling_params, "max_tokens": length, "ignore_eos": True}
            return await super().run(forced, **kwargs)

    globals()[name] = OneCall
    return OneCall
