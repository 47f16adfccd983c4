"""What tests on GPUs measure, kept beside what they assert."""

import json
import os
from pathlib import Path


def note(name: str, **facts: object) -> None:
    """Prints facts as a line of JSON; NAME.jsonl in the folder $OUT gets it too, if that is set."""
    line = json.dumps(facts)
    print(line, flush=True)
    if "OUT" in os.environ:
        with Path(os.environ["OUT"], f"{name}.jsonl").open("a") as file:
            print(line, file=file, flush=True)
