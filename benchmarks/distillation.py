"""Distills the quickstart's trained model into an untrained one, on the student's own replies.

    python benchmarks/distillation.py

The teacher is the quickstart's model after its run; the students have the same sizes and random
weights. No reward trains them: the divergence from the teacher at each token of their replies is
the only part of the loss. One student's teacher is a model on the trainer's ranks. The others ask a
vLLM server: one about the sampled tokens, one about the likely tokens too. Prints one table and
writes benchmarks/results/distillation.json. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from measure import progress, table, write_result
from quickstart_runs import Run, make_model, run_quickstart
from teacher_server import NAME as MODEL
from teacher_server import teacher_server

NAME = "distillation"
TOP_K = 8


def student_settings(estimator: str, *reference: str) -> list[str]:
    """Returns the settings that make a run a distillation."""
    return [
        "algorithm.advantage=none",
        "algorithm.kl.coefficient=1.0",
        f"algorithm.kl.estimator={estimator}",
        *(f"reference.{setting}" for setting in reference),
    ]


def students(teacher: str, base_url: str) -> dict[str, list[str]]:
    """Returns the settings of each student, whose teacher is a folder or behind `base_url`."""
    served = (f"server.base_url={base_url}", f"server.model={MODEL}")
    return {
        "student, by the teacher": student_settings("k2", f"path={teacher}"),
        "student, by a server": student_settings("k2", *served),
        "student, by a server's likely tokens": student_settings(
            "forward_top_k", *served, f"top_k={TOP_K}"
        ),
    }


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
        found, divergence = {"teacher, by rewards": heldout(taught)}, {}
        with teacher_server(teacher, folder / "server.log", more=["--dtype", "float32"]) as url:
            for number, (kind, settings) in enumerate(students(str(teacher), url).items()):
                learnt = run_quickstart(folder, f"student-{number}", [*steps, *settings])
                progress(f"{kind}: {heldout(learnt)}")
                found[kind] = heldout(learnt)
                divergence[kind] = [row["kl_reference"] for row in learnt.rows]
    header = ["model", *(f"step {step}" for step in heldout(taught))]
    rows = [[kind, *(f"{value:.3f}" for value in by.values())] for kind, by in found.items()]
    lines = table(header, rows)
    print("\n".join(lines))
    record = {"steps": arguments.steps, "heldout": found, "kl_reference": divergence}
    write_result(
        NAME, {**record, "settings": students("TEACHER", "http://SERVER/v1"), "table": lines}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
