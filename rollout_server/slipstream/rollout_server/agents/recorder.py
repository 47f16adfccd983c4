"""The calls of one agent: their prompts, their samples, and the conversations that result.

Consumes: requests of the agent, replies of the engine. Produces: the branches of an episode. Waits
for: the engine; room within the limits of the episode. Unblocked by: the engine's answers, the end
of another call, `close`, `cancel`.

The application tells each reply as the chat message that vLLM makes of it when a client sends it
back. The output items of responses are read from the HTTP answer too, since later requests may name
them by their ids.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from pydantic import JsonValue
from slipstream.core.models.images import PlacedImage, check_pixels
from slipstream.rollout_server.agents.call_records import (
    CallRecord,
    EpisodeRecord,
    placed_generation,
    prompt_digest,
    request_digest,
)
from slipstream.rollout_server.agents.conversations import (
    AgentTurn,
    ConversationBranch,
    Conversations,
    Found,
    MessageKey,
    reply_keys,
)
from slipstream.rollout_server.agents.request_rules import Refusal, ServedCall, items_of, room
from slipstream.rollout_server.engine_interface import (
    EngineDied,
    FinishReason,
    Generation,
    GenerationFailed,
    RequestRefused,
    Requests,
    Sampling,
    TextOptions,
    TextPart,
)
from slipstream.rollout_server.usage import UseClock
from slipstream.v1.environment_pb2 import AgentCall

log = logging.getLogger(__name__)

_OK = 200
BUSY = 503
_Parts: TypeAlias = "asyncio.Queue[TextPart | Exception]"

CHAT_PATH = "/v1/chat/completions"
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
_PREVIOUS = "previous_response_id"
# The first id in an answer is its own.
_ID = re.compile(rb'"id":\s*"([^"]+)"')


class Recovered(Exception):  # noqa: N818 - no error
    """Ends the application's part of a call whose answer is in the episode's record."""


class CountReply(Protocol):
    """Counts the tokens of a reply to an agent."""

    def __call__(self, generation: Generation, /, *, is_recovered: bool = False) -> None:
        """Counts a reply, which an earlier attempt has sampled if it `is_recovered`."""


class Recorder:
    """Records the calls of one episode's agent.

    The life of a call: `open` -> `find` -> `begin` -> `sample`, whose parts are read -> `close`. At
    the end of the episode `cancel` ends open calls, and `settled` waits until all their tokens are
    recorded.
    """

    def __init__(
        self,
        requests: Requests,
        key: str,
        sampling: Sampling,
        *,
        sampled: CountReply,
        template_values: Mapping[str, JsonValue] = MappingProxyType({}),
        record: EpisodeRecord | None = None,
    ) -> None:
        """`key` names the episode; `sampled` is called with each generation.

        `template_values` are the environment's values for the chat template. `record` keeps the
        answered calls, and has those of earlier attempts; None keeps none.
        """
        self.conversations = Conversations()
        # All items of a conversation up to and including a response, and the response's turn.
        self._stored: dict[str, tuple[list[Any], AgentTurn]] = {}
        # The items of these responses by their ids.
        self._items: dict[str, Any] = {}
        # The turn of each answer by the answer's id.
        self._turns: dict[str, AgentTurn] = {}
        self.sampling = sampling
        self.template_values = template_values
        self.record = record
        # The number of calls that asked for each ignored setting, by the name of the setting.
        self.ignored: Counter[str] = Counter()
        # The time with at least one reply under way.
        self.clock = UseClock()
        # Whether a call was refused for a limit.
        self.was_refused = False
        # Whether the last reply of a branch was cut off at a limit of the run.
        self._is_cut: dict[ConversationBranch, bool] = {}
        self._requests = requests
        self._key = key
        self._sampled = sampled
        # Calls being served, by their numbers.
        self.open_calls: dict[int, ServedCall] = {}
        # Calls whose replies the conversations do not know yet.
        self._unread: list[ServedCall] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cancelled = False
        self._changed = asyncio.Event()

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of the run refused a call or cut off the last reply of a branch.

        A reply that ends at the `max_tokens` of its own request does not count as cut off.
        """
        return self.was_refused or any(self._is_cut.values())

    def open(self, http: AgentCall, path: str) -> ServedCall:
        """Registers an HTTP call that asks for a reply; `close` ends it."""
        opened = ServedCall(http, f"{self._key}.{http.call}", path)
        self.open_calls[http.call] = opened
        return opened

    def recall(self, opened: ServedCall, served: Mapping[str, Any]) -> None:
        """Looks for the answer to a call in the episode's record; `served` is its request."""
        if self.record is None:
            return
        opened.request_digest = request_digest(
            opened.path, opened.http.branch, served, self.sampling
        )
        opened.record = self.record.take(opened.request_digest)

    async def keep(self, opened: ServedCall) -> None:
        """Keeps a call in the episode's record before its client has the end of the answer."""
        turn = opened.turn
        if self.record is None or turn is None or opened.status != _OK or opened.reply is None:
            return
        assert opened.generation is not None
        kept_record = CallRecord(
            request_digest=opened.request_digest,
            prompt_digest=opened.prompt_digest,
            generation=opened.generation,
            experts_from=opened.experts_from,
            is_cut=opened.is_cut_by_run,
            reply=opened.reply,
            status=opened.status,
            headers=opened.headers,
            body=bytes(opened.body),
        )
        await self.record.keep(opened.http.call, kept_record)

    def close(self, opened: ServedCall) -> None:
        """Ends a call, and the sampling of its reply if that still runs."""
        opened.is_answered = True
        if self.record is not None and opened.record is not None and not opened.is_recovered:
            # The application refused the call before it had a prompt.
            self.record.drop()
        del self.open_calls[opened.http.call]
        if opened.sampling is None:
            self._release(opened)
        else:
            self._end_sampling(opened)

    def cancel(self) -> None:
        """Ends all calls, and refuses later ones."""
        self._is_cancelled = True
        self._changed.set()
        for opened in self.open_calls.values():
            self._end_sampling(opened)

    async def settled(self) -> None:
        """Waits until no reply is being sampled."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def expand(self, body: dict[str, Any]) -> AgentTurn | None:
        """Replaces references to earlier items, and a `previous_response_id`, by what they name.

        All responses of the episode are stored, as OpenAI's API does. Returns the turn that the
        request continues, or None if it names no response. Raises Refusal for what is not stored.
        """
        self._read_replies()
        if isinstance(body.get("input"), list):
            body["input"] = [self._item(item) for item in body["input"]]
        if not isinstance(previous := body.get(_PREVIOUS), str):
            return None
        if previous not in self._stored:
            what = f"Previous response with id {previous[:200]!r} not found."
            raise Refusal(what, code="previous_response_not_found", param=_PREVIOUS)
        del body[_PREVIOUS]
        items, turn = self._stored[previous]
        body["input"] = items + items_of(body)
        return turn

    def _item(self, item: Any) -> Any:  # noqa: ANN401 - JSON
        if not isinstance(item, dict) or item.get("type") != "item_reference":
            return item
        if (name := str(item.get("id"))) not in self._items:
            what = f"Item with id {name[:200]!r} not found."
            raise Refusal(what, code="item_not_found", param="input")
        return self._items[name]

    def turns(self) -> dict[str, AgentTurn]:
        """Returns the turns by the `id` of the answers that clients received."""
        self._read_replies()
        return self._turns

    def find(self, opened: ServedCall, settings: str, keys: Sequence[MessageKey]) -> Found | None:
        """Returns the turn that a request continues, or None; see `Conversations.find`."""
        self._read_replies()
        opened.settings = settings
        opened.keys = keys
        name = opened.http.branch
        previous = opened.previous
        return self.conversations.find(settings, keys, name, previous=previous)

    async def begin(
        self,
        opened: ServedCall,
        turn: AgentTurn | None,
        context: list[int],
        images: Sequence[PlacedImage] = (),
    ) -> list[int]:
        """Waits until the episode's limits leave room for a reply; returns the call's prompt.

        The prompt is the conversation up to `turn`, if any, then `context`; the offsets of `images`
        count from the start of `context`. Raises Refusal if there will never be room, if an
        image is refused, or if the call has been ended.
        """
        name = opened.http.branch
        opened.parent = None if turn is None else turn.branch
        call = opened.call = self.conversations.begin(name, turn, context, images)
        earlier_images = {
            image.data for branch in self.conversations.branches for image in branch.images
        }
        try:
            self.sampling.check_images(earlier_images | {image.data for image in call.images})
            await check_pixels(images)
        except ValueError as error:
            self._release(opened)
            raise Refusal(str(error)) from error
        while True:
            if self._is_cancelled or opened.is_answered:
                self._release(opened)
                raise Refusal("the episode is over")
            # Calls that began and have not ended reserve tokens, turns and branches.
            reservations = [
                (open_call.call, len(open_call.call.context) + open_call.max_tokens)
                for open_call in {*self.open_calls.values(), *self._unread}
                if open_call.call is not None
                and open_call.max_tokens is not None
                and not open_call.call.is_over
            ]
            branches = self.conversations.branches
            reply_room = room(
                self.sampling,
                call,
                tokens=sum(len(branch.token_ids) for branch in branches),
                reserved_tokens=sum(reserved for _, reserved in reservations),
                turns=sum(len(branch.sampled) for branch in branches) + len(reservations),
                branches=len(branches)
                + sum(not reserved_call.is_append for reserved_call, _ in reservations),
            )
            if isinstance(reply_room, int):
                opened.max_tokens = reply_room
                return call.prompt
            if isinstance(reply_room, Refusal):
                self.was_refused = True
                opened.refusal = reply_room
                self._release(opened)
                raise reply_room
            self._changed.clear()
            await self._changed.wait()

    def sample(
        self, opened: ServedCall, max_tokens: int, options: TextOptions
    ) -> AsyncGenerator[TextPart, None]:
        """Starts to sample the reply to a call that has begun; returns a generator of its parts.

        The generator raises what the engine raised, whose refusal `opened` has then. The reply is
        sampled and recorded until `close`, even if the client does not read it. Raises Refusal
        for a call that was closed, whose tokens could not be recorded.
        """
        assert opened.max_tokens is not None, "a call begins before it is sampled"
        if opened.is_answered:
            raise Refusal("the client has hung up")
        parts: _Parts = asyncio.Queue()
        reply_limit = min(max_tokens, opened.max_tokens)
        if self._recover(opened):
            return _ended_by(Recovered())
        opened.sampling = self._start(self._sample(opened, reply_limit, options, parts))
        self._unread.append(opened)
        return _read(parts)

    def _recover(self, opened: ServedCall) -> bool:
        """Gives a call the reply of its record; returns False if it has none that fits."""
        record = opened.record
        call = opened.call
        assert call is not None
        assert opened.max_tokens is not None
        if self.record is None:
            return False
        opened.prompt_digest = prompt_digest(call.prompt, call.images)
        opened.experts_from = call.branch.num_routed
        if record is None:
            return False
        is_same_prompt = record.prompt_digest == opened.prompt_digest
        if not is_same_prompt or len(record.generation.token_ids) > opened.max_tokens:
            self.record.drop()
            opened.record = None
            return False
        generation = placed_generation(record, call.branch, opened.parent)
        self._sampled(generation, is_recovered=True)
        opened.turn = self.conversations.finish(call, generation)
        self._is_cut[call.branch] = record.is_cut
        opened.reply = dict(record.reply)
        opened.is_recovered = True
        self.record.recovered(record)
        self._unread.append(opened)
        self._changed.set()
        return True

    async def _sample(
        self, opened: ServedCall, max_tokens: int, options: TextOptions, parts: _Parts
    ) -> None:
        call = opened.call
        assert call is not None
        self.clock.enter()
        try:
            async for part in self._requests.stream(
                opened.request_id,
                call.prompt,
                self.sampling,
                max_tokens,
                options=options,
                experts_from=call.branch.num_routed,
                images=call.images,
            ):
                if (reply := part.generation) is not None:
                    self._sampled(reply)
                    opened.turn = self.conversations.finish(call, reply)
                    is_cut = reply.finish_reason is FinishReason.LENGTH
                    opened.is_cut_by_run = is_cut and max_tokens == opened.max_tokens
                    self._is_cut[call.branch] = opened.is_cut_by_run
                    opened.generation = None if self.record is None else reply
                parts.put_nowait(part)
        except Exception as error:
            is_known = isinstance(error, (GenerationFailed, EngineDied))
            log.warning("call %s: %s", opened.request_id, error, exc_info=not is_known)
            opened.refusal = Refusal(str(error), code="server_error", status=BUSY)
            if isinstance(error, RequestRefused):
                opened.refusal = Refusal(str(error))
            # The reader of the parts would wait for the last one for ever.
            parts.put_nowait(error)
        finally:
            self.clock.leave()
            self._release(opened)

    def _release(self, opened: ServedCall) -> None:
        if opened.call is not None and not opened.call.is_over:
            self.conversations.finish(opened.call, None)
        self._changed.set()

    def _end_sampling(self, opened: ServedCall) -> None:
        if opened.sampling is not None and not opened.sampling.done():
            self._start(self._requests.cancel(opened.request_id))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _read_replies(self) -> None:
        """Adds the replies that clients have received by now to `conversations`."""
        waiting = []
        for opened in self._unread:
            id_match = _ID.search(opened.body)
            name = "" if id_match is None else id_match[1].decode(errors="replace")
            if opened.turn is not None and name:
                self._turns[name] = opened.turn
            is_over = opened.is_answered and opened.call is not None and opened.call.is_over
            items = None if opened.turn is None else output_items(opened)
            if items is not None and opened.turn is not None and opened.reply is not None:
                keys = reply_keys(opened.reply)
                self.conversations.remember(opened.turn, opened.settings, opened.keys, keys)
                if opened.stored_items is not None:
                    self._stored[name] = [*opened.stored_items, *items], opened.turn
                    self._items |= {str(item.get("id")): item for item in items}
                opened.body.clear()
            elif not is_over:
                waiting.append(opened)
        self._unread = waiting


# The recorder and the call that the current task works for; vLLM's own tasks inherit it.
CURRENT: ContextVar[tuple[Recorder, ServedCall] | None] = ContextVar("agent_call", default=None)


async def _ended_by(error: Exception) -> AsyncGenerator[TextPart, None]:
    raise error
    yield


async def _read(parts: _Parts) -> AsyncGenerator[TextPart, None]:
    while True:
        part = await parts.get()
        if isinstance(part, Exception):
            raise part
        yield part
        if part.generation is not None:
            return


def output_items(opened: ServedCall) -> list[Any] | None:
    """Returns the output items in the HTTP answer to a call; None if it has failed or is not whole.

    Answers of other APIs than that of responses have no items.
    """
    if opened.status != _OK or opened.reply is None:
        return None
    if opened.path != RESPONSES_PATH:
        return []
    body = bytes(opened.body)
    with contextlib.suppress(ValueError):
        if body.startswith(b"{"):
            return list(json.loads(body)["output"])
        for line in reversed(body.split(b"\n")):
            if line.startswith(b"data: ") and b'"response.completed"' in line:
                return list(json.loads(line.removeprefix(b"data: "))["response"]["output"])
    return None
