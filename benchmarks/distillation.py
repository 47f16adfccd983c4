"""Distills the quickstart's trained model into an untrained one, on the student's own replies.

    python benchmarks/distillation.py

The teacher is the quickstart's model after its run; the student has the same sizes and random
weights. No reward trains the student: the divergence from the teacher at each token of its replies
is the only part of its loss. Prints one table and writes benchmarks/results/distillation.json.
Takes about four minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from measure import progress, table, write_result
from quickstart_runs import Run, make_model, run_quickstart

NAME = "distillation"


def student_settings(teacher: Path) -> list[str]:
    """Returns the settings that make a run a distillation."""
    return [
        "algorithm.advantage=none",
        "algorithm.kl.coefficient=1.0",
        "algorithm.kl.estimator=k2",
        f"reference.path={teacher}",
    ]


def heldout(run: Run) -> dict[int, float]:
    """Returns the rewards held out, by step."""
    return {row["evaluation_step"]: row["reward_heldout"] for row in run.evaluations}


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, steps = Path(name), [f"run.steps={arguments.steps}"]
        make_model(folder)
        taught = run_quickstart(folder, "teacher", [*steps, "learner.export_final=true"])
        progress(f"teacher: {heldout(taught)}")
        teacher = folder / "teacher" / "checkpoints" / "final"
        learnt = run_quickstart(folder, "student", [*steps, *student_settings(teacher)])
        progress(f"student: {heldout(learnt)}")
    found = {"teacher, by rewards": heldout(taught), "student, by the teacher": heldout(learnt)}
    header = ["model", *(f"step {step}" for step in heldout(taught))]
    rows = [[kind, *(f"{value:.3f}" for value in by.values())] for kind, by in found.items()]
    divergence = [row["kl_reference"] for row in learnt.rows]
    lines = table(header, rows)
    print("\n".join(lines))
    record = {"steps": arguments.steps, "heldout": found, "kl_reference": divergence}
    write_result(NAME, {**record, "settings": student_settings(Path("TEACHER")), "table": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
