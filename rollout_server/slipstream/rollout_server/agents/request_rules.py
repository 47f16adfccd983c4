"""One HTTP request of an agent while it is served, and the rules that it must keep.

These are the limits of its episode, and the run's sampling settings, which replace the agent's.
Tokens that are trained must come from the distribution of the run. A request may only shorten its
reply (`max_tokens`, `stop`) and, without speculative decoding, choose its `seed`.
"""

import asyncio
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.errors import EPISODE_LIMIT
from slipstream.core.template_values import OWNED
from slipstream.rollout_server.agents.call_records import NOT_COMPARED, CallRecord
from slipstream.rollout_server.agents.conversations import (
    AgentCall,
    AgentTurn,
    ConversationBranch,
    MessageKey,
)
from slipstream.rollout_server.chat import ENDED_BY_MODEL, ReplyEnding
from slipstream.rollout_server.engine_interface import Generation, Sampling
from slipstream.v1 import environment_pb2


class Refusal(Exception):
    """The error answer to a call, raised or returned.

    `code` and `param` are the fields of the same names in an error of OpenAI's API.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status


# Means that the call must wait, since an open call may leave room for it.
WAIT = None


def room(
    sampling: Sampling,
    call: AgentCall,
    *,
    tokens: int,
    reserved_tokens: int,
    turns: int,
    branches: int,
) -> int | Refusal | None:
    """Returns the most tokens of a call's reply, or a Refusal if the episode's limits forbid it.

    Returns WAIT while open calls reserve tokens that this call needs. The episode has used `tokens`
    without those of the call. `turns` and `branches` count open calls, which reserve tokens, too.
    """
    if turns >= sampling.max_turns:
        limit = f"sampling.max_turns = {sampling.max_turns}"
        return Refusal(f"{EPISODE_LIMIT} {limit}", code="max_turns_exceeded")
    if not call.is_append and branches >= sampling.max_branches:
        limit = f"sampling.max_branches = {sampling.max_branches}"
        return Refusal(f"{EPISODE_LIMIT} {limit}", code="max_branches_exceeded")
    prompt = len(call.prompt)
    used_tokens = tokens + len(call.context)
    in_branch = sampling.max_episode_tokens - prompt
    if in_branch < 1:
        return _too_long(prompt, "sampling.max_episode_tokens", sampling.max_episode_tokens)
    ever = sampling.total_tokens - used_tokens
    if ever < 1:
        name = "max_total_tokens" if sampling.max_total_tokens else "max_episode_tokens"
        return _too_long(used_tokens, f"sampling.{name}", sampling.total_tokens)
    reply_limit = min(in_branch, sampling.max_reply_tokens)
    new_tokens = min(reply_limit, ever - reserved_tokens)
    # A reply is not cut short because of calls that may need less than they reserve.
    if reserved_tokens and new_tokens < reply_limit:
        return WAIT
    return new_tokens


def _too_long(num_tokens: int, name: str, limit: int) -> Refusal:
    what = f"{num_tokens} tokens leave no room for a reply within {name} = {limit}"
    return Refusal(f"prompt is too long: {what}", code="context_length_exceeded")


@dataclass(eq=False)
class ServedCall:
    """The state of a call that asks for a reply.

    `call` and `max_tokens` are set when the call begins, `turn` when its reply has been sampled.
    If `turn` stays None, the call has sampled nothing.
    """

    http: environment_pb2.AgentCall
    request_id: str
    path: str
    settings: str = ""
    keys: Sequence[MessageKey] = ()
    # The turn that the request names as the previous one, or None.
    previous: AgentTurn | None = None
    # The input of a request whose response is stored, else None.
    stored_items: list[Any] | None = None
    call: AgentCall | None = None
    # The branch whose conversation the call continues, or None.
    parent: ConversationBranch | None = None
    # The digest of all that the call asks for, where answered calls are kept.
    request_digest: bytes = b""
    # The recorded call whose answer this one may get, and whether its reply is that of the record.
    record: CallRecord | None = None
    is_recovered: bool = False
    # What such a record needs of the call, once its reply has been sampled.
    prompt_digest: bytes = b""
    experts_from: int = 0
    generation: Generation | None = None
    is_cut_by_run: bool = False
    # The most tokens of its reply; with its new context they count against the episode's limit
    # until it ends.
    max_tokens: int | None = None
    # Samples the reply, even if the client has stopped reading.
    sampling: asyncio.Task[None] | None = None
    turn: AgentTurn | None = None
    refusal: Refusal | None = None
    # How the reply ended, and whether a limit of tokens cut it, once it has been sampled.
    ending: ReplyEnding = ENDED_BY_MODEL
    is_cut: bool = False
    # The reply as a chat message, once the application has all of it.
    reply: dict[str, Any] | None = None
    # The answer that the client was sent; it is parsed when a later call may continue this call.
    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytearray = field(default_factory=bytearray)
    is_answered: bool = False


SAMPLING_HEADER = "x-slipstream-sampling"
# The values that hold where the run has no setting of that name.
_NEUTRAL: dict[str, object] = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
}
# Fields that are served where vLLM's request has them. Others are taken out, so that no field of a
# newer vLLM constrains what is sampled, replaces the prompt or sends the reply elsewhere.
_SERVED = frozenset(
    [
        "add_generation_prompt",
        "background",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "enable_response_messages",
        "include",
        "include_reasoning",
        "include_stop_str_in_output",
        "input",
        "instructions",
        "logprobs",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "media_io_kwargs",
        "messages",
        "mm_processor_kwargs",
        "model",
        "output_config",
        "parallel_tool_calls",
        "previous_response_id",
        "reasoning",
        "reasoning_effort",
        "request_id",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",
        "session_id",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_sequences",
        "stream",
        "stream_interval",
        "system",
        "text",
        "thinking",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncation",
        "use_beam_search",
    ]
)
# Fields of vLLM, and of other engines, by which a reply keeps a schema, a pattern or a grammar.
_FORMS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
)
# Types of a reply's format that promise nothing, in OpenAI's APIs a schema that is not strict too.
_FREE_FORMATS = (None, "text", "json_object")
# Fields that no reply depends on, whether vLLM has them or not.
_WITHOUT_EFFECT = NOT_COMPARED.union(
    ["store", "speed", "stream_options", "cache_control", "inference_geo"]
)
# Keys that are read, or have no effect, of fields that are objects, and of each tool, message
# and result.
_READ = {
    "text": (),
    "reasoning": ("effort",),
    "output_config": ("effort",),
    "thinking": ("type",),
    "tools": (
        "type",
        "function",
        "name",
        "description",
        "parameters",
        "input_schema",
        "tools",
        "defer_loading",
        "cache_control",
        "eager_input_streaming",
    ),
    "messages": (
        "role",
        "content",
        "name",
        "reasoning",
        "reasoning_content",
        "tool_calls",
        "task",
        "tool_call_id",
        "tools",
        "annotations",
        "provider_specific_fields",
    ),
    "tool_result": ("type", "tool_use_id", "content", "cache_control"),
}
# Types of tools that an agent runs itself; others are run by the servers of OpenAI or Anthropic.
_OWN_TOOLS = (None, "function", "custom", "namespace")
# Blocks that a tool's result may hold in Anthropic's API; vLLM would drop the rest.
_RESULTS = ("text", "image", "tool_reference")
# Values that ask for nothing.
_NOTHING: tuple[object, ...] = (None, [], False, 0, ["text"], {"type": "text"})
_NOT = "none (asked)"
# An addition to its output that a response may hold.
_LOGPROBS = "message.output_text.logprobs"
# The variable of a chat template that vLLM sets for an effort of reasoning.
_SWITCH = "enable_thinking"
# Limits of a reply, which hold below the run's.
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def rule(
    body: dict[str, Any],
    sampling: Sampling,
    *,
    fields: Collection[str],
    variables: Collection[str],
    has_drafts: bool = False,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the request to serve for a JSON `body`, and what it asked for in vain.

    The latter has what holds in place of it, by the name of the setting, in the form of the header
    `SAMPLING_HEADER`. Raises Refusal for a request that cannot be served.

    `fields` are those of vLLM's request, of which `_SERVED` are taken, and `variables` what the
    chat template reads. If the engine `has_drafts`, the seed is ignored: drafts may repeat earlier
    replies. With their random numbers, likely tokens would be accepted more often than their
    probability.
    """
    _check_sampling(body)
    _check_forms(body)
    _check_history(body)
    request = _limited(body, sampling)
    run_values = _NEUTRAL | sampling.distribution
    unmet = {
        name: f"{_word(value)} (asked {_word(body[name])})"
        for name, value in run_values.items()
        if body.get(name) is not None and body[name] != value
    }
    ignored = _take_unserved(request, fields, variables, run_values.keys() - {"logit_bias"})
    unmet |= {_label(name): _NOT for name in ignored if name not in run_values}
    template_values = request.get("chat_template_kwargs")
    template_values = template_values if isinstance(template_values, dict) else {}
    unmet |= _template_variables(request, template_values, variables)
    unmet |= _includes(request)
    unmet |= _efforts(request, template_values, variables)
    # Anthropic's API lets a reply begin as the last message says.
    last = _objects(request.get("messages"))[-1:]
    if "stop_sequences" in fields and last and last[0].get("role") == "assistant":
        unmet["prefill"] = _NOT
    if has_drafts and request.pop("seed", None) is not None:
        unmet["seed"] = _NOT
    if request.get("truncation") == "auto":
        unmet["truncation"] = '"disabled" (asked)'
    unmet |= _tool_choice(request)
    return request, unmet | _parts(request)


def _check_sampling(body: Mapping[str, Any]) -> None:
    """Raises Refusal for a request of several replies, a beam search or a reply for later."""
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise Refusal(f"{name} must be 1, got {body[name]!r}: send one call for each")
    top_logprobs = body.get("top_logprobs")
    if isinstance(top_logprobs, int) and top_logprobs < 0:
        # vLLM takes a negative number for the whole vocabulary.
        raise Refusal(f"top_logprobs must be at least 0, got {top_logprobs}", param="top_logprobs")
    if body.get("use_beam_search"):
        raise Refusal("use_beam_search is refused: replies are sampled")
    if body.get("background"):
        raise Refusal("background must be false: an agent gets its reply in the answer")


def _limited(body: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
    """Returns the fields that a body gives, with its limits of a reply at most the run's."""
    # A field that is null is left to its default, which vLLM refuses for some names.
    request = {
        name: value
        for name, value in body.items()
        if value is not None and name not in ("n", "best_of")
    }
    for name in _LENGTHS:
        if isinstance(body.get(name), int):
            request[name] = min(body[name], sampling.max_reply_tokens)
    return request


def _take_unserved(
    request: dict[str, Any],
    fields: Collection[str],
    variables: Collection[str],
    distribution: Collection[str],
) -> list[str]:
    """Takes out the fields that nothing serves; returns those of them that ask for something.

    `distribution` names the settings whose values are the run's, where vLLM knows them.
    """
    served_fields = _SERVED.union(distribution).intersection(fields) | _WITHOUT_EFFECT
    if "documents" not in variables:
        served_fields -= {"documents"}
    dropped = [name for name in request if name not in served_fields]
    return [name for name in dropped if request.pop(name) not in _NOTHING]


def _template_variables(
    request: dict[str, Any], values: Mapping[str, Any], variables: Collection[str]
) -> dict[str, str]:
    """Takes out the template's variables that it does not read, and returns what was unmet."""
    unread = sorted(name for name in values if name in OWNED or name not in variables)
    if unread:
        request["chat_template_kwargs"] = {
            name: value for name, value in values.items() if name not in unread
        }
    return {f"chat_template_kwargs.{_label(name)}": _NOT for name in unread}


def _includes(request: Mapping[str, Any]) -> dict[str, str]:
    """Returns the additions to a response that are asked for and that it cannot hold."""
    includes = request.get("include")
    if not isinstance(includes, list):
        return {}
    unserved = [include for include in includes if include != _LOGPROBS]
    return {"include": f"none (asked {_word(unserved)})"} if unserved else {}


def _tool_choice(request: dict[str, Any]) -> dict[str, str]:
    """Leaves the choice of a tool to the model, and returns what was unmet."""
    choice = request.get("tool_choice")
    choice_type = choice.get("type") if isinstance(choice, dict) else choice
    if choice is None or choice_type in ("auto", "none"):
        return {}
    is_anthropics = isinstance(choice, dict) and choice_type in ("any", "tool")
    request["tool_choice"] = {**choice, "type": "auto"} if is_anthropics else "auto"
    return {"tool_choice": "auto (asked)"}


def _efforts(
    request: dict[str, Any], values: dict[str, Any], variables: Collection[str]
) -> dict[str, str]:
    """Returns what holds in place of an effort of reasoning, if the template does not read it.

    vLLM also gives the template a switch, unless it is among `values`, which knows only "none".
    """
    if "reasoning_effort" in variables:
        return {}
    efforts = {"reasoning_effort": request.get("reasoning_effort")}
    for name in ("reasoning", "output_config"):
        efforts |= {f"{name}.effort": part.get("effort") for part in _objects([request.get(name)])}
    if request.get("thinking") == {"type": "disabled"}:
        efforts["thinking.disabled"] = "none"
    if _SWITCH in variables and _SWITCH not in values:
        on = {name: effort for name, effort in efforts.items() if effort not in (None, "none")}
        return {name: f"{_SWITCH} (asked {_word(effort)})" for name, effort in on.items()}
    return {name: _NOT for name, effort in efforts.items() if effort is not None}


def _parts(request: dict[str, Any]) -> dict[str, str]:
    """Returns what the objects in a request ask for in vain, and takes it out where vLLM minds."""
    tools = _objects(request.get("tools"))
    foreign = [tool["type"] for tool in tools if tool.get("type") not in _OWN_TOOLS]
    unmet = {"server_tools": f"none (asked {_word(foreign)})"} if foreign else {}
    agent_tools = [tool for tool in tools if tool.get("type") in _OWN_TOOLS]
    agent_tools += _objects([tool.get("function") for tool in agent_tools])
    messages = _objects(request.get("messages"))
    for message in messages:
        if message.get("content") == []:
            # pydantic hands vLLM an iterator in the place of an empty list.
            message["content"] = ""
    parts = {"tools": agent_tools, "messages": messages, "tool_result": _results(messages)}
    for name, read in _READ.items():
        for part in parts.get(name, _objects([request.get(name)])):
            unread_keys = [key for key in part if key not in read and part[key] not in _NOTHING]
            unmet |= {f"{name}.{_label(key)}": _NOT for key in unread_keys}
            if name not in parts:
                request[name] = {key: part[key] for key in part if key in read}
    if request.get("thinking") == {"type": "enabled"}:
        # Without its budget, which would have to be smaller than the reply.
        request["thinking"] = {"type": "adaptive"}
    return unmet


def _check_forms(body: dict[str, Any]) -> None:
    """Raises Refusal for a request whose reply must keep a schema, a pattern or a grammar.

    A client parses such a reply without a look: one that is sampled freely breaks it.
    """
    names = [name for name in _FORMS if body.get(name) not in _NOTHING]
    formats = {
        "response_format": body.get("response_format"),
        "text.format": _field(body, "text", "format"),
        "output_format": body.get("output_format"),
        "output_config.format": _field(body, "output_config", "format"),
    }
    for name, value in formats.items():
        has_free_schemas = name in ("response_format", "text.format")
        if _is_binding(value, has_free_schemas=has_free_schemas):
            names.append(name)
    if names:
        raise Refusal(
            f"{names[0]} asks for a reply that keeps a form, such as a JSON schema: replies are "
            "sampled from the whole distribution of the model, which is trained, and may break "
            "it; ask for JSON in a message, and check the reply",
            code="unsupported_value",
            param=names[0],
        )


def _field(body: Mapping[str, Any], name: str, inner: str) -> object:
    part = body.get(name)
    return part.get(inner) if isinstance(part, dict) else None


def _is_binding(value: object, *, has_free_schemas: bool) -> bool:
    """Whether a reply must keep a format.

    OpenAI's APIs, which `has_free_schemas`, promise nothing of a schema that is not strict.
    Anthropic's promises each.
    """
    if not isinstance(value, dict) or value.get("type") in _FREE_FORMATS:
        return False
    if value["type"] != "json_schema" or not has_free_schemas:
        return True
    schema = value.get("json_schema", value)
    return isinstance(schema, dict) and schema.get("strict") is True


def _check_history(body: dict[str, Any]) -> None:
    """Raises Refusal for parts of messages that vLLM would drop, or fail at."""
    kinds = [part.get("type") for part in _objects(body.get("system"))]
    if any(kind != "text" for kind in kinds):
        raise Refusal(f"system must hold text, got {_word(kinds)}", param="system")
    for result in _results(_objects(body.get("messages"))):
        kinds = [part.get("type") for part in _objects(result.get("content"))]
        if not all(kind in _RESULTS for kind in kinds):
            raise Refusal(f"a tool_result must hold text or images, got {_word(kinds)}")
    for item in _objects(body.get("input")):
        kinds = [part.get("type") for part in _objects(item.get("content"))]
        is_list = item.get("role") == "assistant" and isinstance(item.get("content"), list)
        if is_list and kinds not in (["output_text"], ["input_text"], ["text"]):
            what = f"a message of the assistant must have one part of text, got {_word(kinds)}"
            raise Refusal(what, param="input")


def _results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the results of tools in messages of Anthropic's API."""
    blocks = itertools.chain.from_iterable(_objects(message.get("content")) for message in messages)
    return [block for block in blocks if block.get("type") == "tool_result"]


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _label(name: str) -> str:
    # The name becomes a part of a header and the name of a metric.
    return name if name.isascii() and name.isidentifier() else "others"


def _word(value: object) -> str:
    # JSON has neither control characters nor letters that a header may not hold.
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)[:100]


def items_of(body: dict[str, Any]) -> list[Any]:
    """Returns the input of the request `body` as a list of items."""
    value = body.get("input")
    return list(value) if isinstance(value, list) else [{"role": "user", "content": value}]
