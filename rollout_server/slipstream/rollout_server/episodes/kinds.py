"""The kinds of episodes: an environment judges replies, or an agent asks for them."""

from slipstream.core.types import Status
from slipstream.rollout_server.episodes.calls import Opening, StreamSession
from slipstream.rollout_server.episodes.environment_talk import EnvironmentTalk
from slipstream.rollout_server.episodes.play import Play


async def talk(play: Play, session: StreamSession, opening: Opening) -> Status:
    """Plays an episode of the kind that `opening` asks for; returns how it ended."""
    if not opening.is_agent:
        return await EnvironmentTalk(play, session).run(opening)
    from slipstream.rollout_server.episodes.agent_talk import serve_agent

    return await serve_agent(play, session, opening)
