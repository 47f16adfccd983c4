"""The end of training: the trainer saves and exports the model, which may take hours.

Consumes: the times of the trainer's calls. Produces: a failed run when the calls end too soon.
Waits for: the trainer's goodbye. Unblocked by: that goodbye, the failure of the run, or silence.
"""

from __future__ import annotations

from slipstream.learner.controller.run import Run
from slipstream.learner.controller.services.trainer_service import TrainerServicer

LOOK_S = 5.0


async def await_goodbye(run: Run, trainer: TrainerServicer, *, silence_s: float) -> None:
    """Returns when the trainer has left in order or the run has failed.

    The run fails when the trainer makes no call for `silence_s`, or leaves without the model that
    `learner.export_final` asks for.
    """
    progress = run.progress
    progress.waits_for("the trainer to save and export the model")
    begun_s = run.clock.now_s()
    while not trainer.finished.is_set() and not progress.has_failed:
        silent_s = run.clock.now_s() - max(begun_s, progress.trainer_heard_s)
        if silent_s > silence_s:
            progress.fail(
                f"nothing was heard of the trainer for {silent_s:.0f} s while it was to save and "
                "export the model; run the same command again to resume it"
            )
            return
        await run.signal.wait(min(LOOK_S, silence_s - silent_s + 0.001))
    goodbye, is_wanted = trainer.goodbye, run.config.learner.export_final
    if goodbye is not None and is_wanted and not goodbye.export_path:
        progress.fail(
            "the trainer left without exporting the model; run the same command again to resume it"
        )
