"""The kinds of episodes: an environment judges replies, or an agent or a client asks for them."""

from slipstream.core.types import Status
from slipstream.protocol.codec import pack_logprobs
from slipstream.rollout_server.engine_interface import FinishReason
from slipstream.rollout_server.episodes.calls import Opening, StreamSession
from slipstream.rollout_server.episodes.environment_talk import EnvironmentTalk, PromptTooLong
from slipstream.rollout_server.episodes.play import Play


async def talk(play: Play, session: StreamSession, opening: Opening) -> Status:
    """Plays an episode of the kind that `opening` asks for; returns how it ended."""
    if not opening.is_agent:
        return await EnvironmentTalk(play, session).run(opening)
    from slipstream.rollout_server.episodes.agent_talk import serve_agent

    return await serve_agent(play, session, opening)


async def reply_alone(play: Play) -> Status:
    """Samples the only reply to the prompt of the lease; returns how it ended."""
    recording, lease = play.recording, play.lease
    recording.add_context(list(lease.prompt))
    recording.prompt_tokens = len(lease.prompt)
    room = recording.room(lease.sampling)
    if room < 1:
        raise PromptTooLong(
            f"a prompt of {len(lease.prompt)} tokens leaves no room for a reply within "
            f"sampling.max_episode_tokens = {lease.sampling.max_episode_tokens}"
        )
    generation = await play.generate(min(room, lease.sampling.max_reply_tokens))
    if generation.prompt_logprobs is not None:
        recording.prompt_logprobs = pack_logprobs(generation.prompt_logprobs)
    is_cut = generation.finish_reason is FinishReason.LENGTH
    return Status.TRUNCATED if is_cut else Status.COMPLETED
