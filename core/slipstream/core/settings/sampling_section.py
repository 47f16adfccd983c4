"""How replies are sampled, and the limits of an episode's length."""

from typing import Annotated, Any, Literal

from pydantic import Field
from slipstream.core.settings.measurement_sections import MAX_TEMPERATURE, MIN_TEMPERATURE
from slipstream.core.settings.section import Positive, Section
from slipstream.v1 import fleet_pb2

# Most replies of an episode where `max_turns` is 0. One that never ends is stopped by the limits of
# tokens, mostly, and by this.
MAX_TURNS = 256


class SamplingSection(Section):
    """Sampling of replies, and limits of an episode's length."""

    # Sampling temperature, by which the learner divides its logits too, but for replies that an
    # environment gives: these are trained at temperature 1. The bounds are vLLM's.
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    # Sampling uses the smallest set of tokens with this probability; the learner ignores it.
    top_p: float = Field(1.0, gt=0, le=1)
    # Sampling uses this many of the most probable tokens; the learner ignores it. 0: no limit.
    top_k: int = Field(0, ge=0)
    # Most sampled tokens of one reply.
    max_reply_tokens: Positive = 3072
    # Most replies of one episode; 0: 256. An environment ends its episodes, and so do the limits of
    # tokens.
    max_turns: int = Field(0, ge=0)
    # Most tokens of an episode, context and sampled. It bounds each branch of an agent's episode.
    max_episode_tokens: Positive = 4096
    # Most tokens of all branches of an episode together. 0: `max_episode_tokens`.
    max_total_tokens: int = Field(0, ge=0)
    # Most branches of an episode, the conversations that an agent has with the model.
    max_branches: int = Field(16, ge=1, le=256)
    # Most tokens of a task before the first reply; by default one less than max_episode_tokens.
    # Prompts are never cut.
    max_prompt_tokens: Positive | None = None
    # Treatment of a task with a longer prompt. skip: the task is set aside and counted, and another
    # task takes its place; refuse: the run fails and names the task.
    long_prompts: Literal["skip", "refuse"] = "skip"
    # Token ids besides the end-of-text token at which a reply ends, for example that of <|eom_id|>.
    # The token that ends a reply belongs to it, and is trained.
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    # Texts at which a reply ends. The token that completes the first such text belongs to the
    # reply. Special tokens count as their text. Servers then detokenize all replies: prefer
    # stop_token_ids.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    # Most images of an episode. 0: an episode with an image fails. More need a model with vision.
    max_images: int = Field(0, ge=0, le=64)
    # Most bytes of an image, encoded. A lease reserves `max_images` of them in the queue.
    max_image_bytes: int = Field(262144, ge=1, le=16777216)

    @property
    def total_tokens(self) -> int:
        """Most tokens of an episode, all branches together."""
        return self.max_total_tokens or self.max_episode_tokens

    def to_pb(self) -> fleet_pb2.SamplingSettings:
        """Returns the wire form: each of its fields is the setting of the same name.

        The adapter is left out, since each environment has its own, and what `debug` has.
        """
        values: dict[str, Any] = {
            name: getattr(self, name)
            for name in fleet_pb2.SamplingSettings.DESCRIPTOR.fields_by_name
            if name not in ("adapter", "ignore_eos")
        }
        return fleet_pb2.SamplingSettings(**values)
