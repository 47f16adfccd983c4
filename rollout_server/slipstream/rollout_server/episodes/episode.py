"""One episode: environment and model take turns until the environment or a limit ends it.

Consumes: a session of an environment, an
engine. Produces: one trajectory, unless the engine dies. Waits for: the environment, or the agent's
calls, and the engine. Unblocked by: their answers, the environment's limit, `cancel`.
"""

import logging
import traceback
from pathlib import Path

from slipstream.core.errors import ConfigError, EnvironmentFailed
from slipstream.core.types import Failure, FailureKind, Status, Trajectory
from slipstream.rollout_server.engine_interface import EngineDied, GenerationFailed
from slipstream.rollout_server.episodes.calls import MAX_MESSAGE_CHARACTERS
from slipstream.rollout_server.episodes.environment_talk import PromptTooLong
from slipstream.rollout_server.episodes.epoch_counters import EpochCounters
from slipstream.rollout_server.episodes.kinds import reply_alone, talk
from slipstream.rollout_server.episodes.lease import EpisodeTask, trajectory_of
from slipstream.rollout_server.episodes.play import Cancelled, EpisodeServices, Play, ServiceFailed
from slipstream.rollout_server.episodes.recording import Recording
from slipstream.rollout_server.episodes.renderer import RenderingFailed

log = logging.getLogger(__name__)


class Episode:
    """One attempt of a group's member; `run` may be called once, and `cancel` ends it early."""

    def __init__(
        self, task: EpisodeTask, services: EpisodeServices, counters: EpochCounters
    ) -> None:
        self._task, self._services, self._counters = task, services, counters
        self._play = Play(task, services, counters)

    async def run(self) -> Trajectory:
        """Runs the episode to its end; returns the trajectory, with the cause of a failure.

        Raises only EngineDied and ConfigError, which end the server.
        """
        self._counters.open_episodes += 1
        status, failure = Status.FAILED, None
        try:
            status = await self._played()
        except Cancelled:
            status = Status.CANCELLED
        except (EngineDied, ConfigError):
            self._counters.is_broken_off = True
            raise
        except Exception as error:  # noqa: BLE001 - logged, and told as the episode's failure
            failure = _failure(error)
        except BaseException:
            self._counters.is_broken_off = True
            raise
        self._counters.ended(self._play.recording.num_sampled)
        try:
            return self._trajectory(status, failure)
        except Exception as error:  # noqa: BLE001 - as above; the ledger shows the lost tokens
            self._play.recording = Recording()
            return self._trajectory(Status.FAILED, _failure(error))

    async def cancel(self) -> None:
        """Makes `run` return soon, with the tokens sampled so far, unless `run` has ended."""
        await self._play.cancel()

    async def _played(self) -> Status:
        """Plays the episode in its environment; returns how it ended."""
        play, lease, session = self._play, self._task.lease, None
        if lease.prompt:
            return await reply_alone(play)
        try:
            opened = self._services.environments.open(
                lease.environment,
                self._task.key,
                lease.task_index,
                self._task.attempt,
                lease.timeout_s,
            )
            session = await play.ask(opened)
            opening = await play.ask(session.reset(lease.task_index, lease.seed))
            play.recording.max_reply_tokens = opening.max_reply_tokens
            play.recording.expected_answer = opening.expected_answer
            status = await talk(play, session, opening)
            await self._ask_reference(status)
            return status
        finally:
            if session is not None:
                session.close()

    async def _ask_reference(self, status: Status) -> None:
        server, recording = self._services.reference, self._play.recording
        if server is not None and self._task.is_trained(status):
            recording.close()
            before_s = recording.environment_s
            recording.reference = await self._play.ask(server.logprobs(recording.sequences()))
            recording.environment_s = before_s

    def _trajectory(self, status: Status, failure: Failure | None) -> Trajectory:
        model = self._services.model
        return trajectory_of(
            self._task,
            self._play.recording,
            status,
            failure,
            renderer=model.renderer,
            num_experts=model.engine.num_experts,
        )


_FAILURES = {
    RenderingFailed: FailureKind.ENVIRONMENT,
    PromptTooLong: FailureKind.PROMPT_TOO_LONG,
    GenerationFailed: FailureKind.ENGINE,
    ServiceFailed: FailureKind.INFRASTRUCTURE,
}


def _failure(error: Exception) -> Failure:
    """Returns the failure of an episode that ended with `error`, which is logged if unexpected.

    An unexpected error counts against the environment: one that fails all episodes ends the run.
    """
    said = str(error)
    if isinstance(error, EnvironmentFailed):
        kind = FailureKind(error.kind)
    elif known := [kind for cause, kind in _FAILURES.items() if isinstance(error, cause)]:
        kind = known[0]
    else:
        log.error("an episode ended with an unexpected error", exc_info=error)
        kind, last = FailureKind.ENVIRONMENT, traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
        said = f"unexpected error of the rollout server: {type(error).__name__}: {said} ({place})"
    # Texts of models and templates may have what no message can carry.
    clean = said.encode(errors="replace").decode()
    return Failure(kind, clean[:MAX_MESSAGE_CHARACTERS])
