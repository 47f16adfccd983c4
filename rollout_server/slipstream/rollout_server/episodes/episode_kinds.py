"""The kinds of episodes with an environment: it judges replies, or its agent asks for them."""

from slipstream.core.types import Status
from slipstream.rollout_server.episodes.calls import StreamSession
from slipstream.rollout_server.episodes.environment_talk import EnvironmentTalk
from slipstream.rollout_server.episodes.play import EpisodeAttempt
from slipstream.v1 import environment_pb2


async def talk(
    play: EpisodeAttempt, session: StreamSession, opening: environment_pb2.Observation
) -> Status:
    """Plays an episode of the kind that `opening` asks for; returns how it ended."""
    if not opening.is_agent:
        return await EnvironmentTalk(play, session).run(opening)
    from slipstream.rollout_server.episodes.agent_talk import serve_agent

    return await serve_agent(play, session, opening)
