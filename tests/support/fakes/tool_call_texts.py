"""Two calls `add(a=51, b=7)` and `add(a=62, b=8)` as each parser of vLLM reads them."""

import json
import re
from collections.abc import Callable, Collection

CALLS = [("add", {"a": 51, "b": 7}), ("add", {"a": 62, "b": 8})]
PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
]
_DSML = "｜DSML｜"
_MINIMAX = "]<]minimax[>["
# Marks that a text above need not have, but that a parser looks for in the vocabulary.
_FURTHER_MARKS = [
    "<|channel>",
    "<channel|>",
    "<|turn>",
    '<|"|>',
    "<|content_thinking|>",
    "<|content_model_end_sampling|>",
    "<|content_invoke_tool_text|>",
    "<|content_tool_error|>",
    "<seed:think>",
    "</seed:think>",
    "<|eot|>",
    "<|start|>",
    "<|role_sep|>",
    "<|message_sep|>",
    "<|plamo:begin_think:plamo|>",
    "<|plamo:end_think:plamo|>",
    "<|plamo:tag|>",
    "<response>",
    "</response>",
    "<0x0A>",
    "<|python_tag|>",
]
_MARK = re.compile(
    r"\]<\]minimax\[>\[|</?[^<>\n=\"]{2,60}>|<\|tool_call>|<tool_call\|>|\[TOOL_CALLS\]|\[ARGS\]"
)


def _two(call: Callable[[int, int], str], between: str = "") -> str:
    return call(51, 7) + between + call(62, 8)


def _json(a: int, b: int, arguments: str = "arguments") -> str:
    return json.dumps({"name": "add", arguments: {"a": a, "b": b}})


def _json_list(arguments: str = "arguments") -> str:
    return f"[{_two(lambda a, b: _json(a, b, arguments), ', ')}]"


def _in(start: str, end: str) -> str:
    return _two(lambda a, b: f"{start}\n{_json(a, b)}\n{end}")


def _xml(start: str = "<tool_call>", end: str = "</tool_call>") -> str:
    return _two(
        lambda a, b: (
            f"{start}\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n"
            f"<parameter=b>\n{b}\n</parameter>\n</function>\n{end}"
        )
    )


def _keyed(a: int, b: int, separator: str = "") -> str:
    return (
        f"<tool_call>add{separator}\n<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>\n"
        f"<arg_key>b</arg_key>\n<arg_value>{b}</arg_value>\n</tool_call>\n"
    )


def _dsml(block: str, space: str = "") -> str:
    mark = _DSML + space

    def call(a: int, b: int) -> str:
        return (
            f'<{mark}invoke name="add">\n'
            f'<{mark}parameter name="a" string="false">{a}</{mark}parameter>\n'
            f'<{mark}parameter name="b" string="false">{b}</{mark}parameter>\n</{mark}invoke>\n'
        )

    return f"<{mark}{block}>\n{_two(call)}</{mark}{block}>"


def _invoke(a: int, b: int) -> str:
    return (
        f'<invoke name="add">\n<parameter name="a">{a}</parameter>\n'
        f'<parameter name="b">{b}</parameter>\n</invoke>\n'
    )


def _minimax(a: int, b: int) -> str:
    return (
        f'{_MINIMAX}<invoke name="add">\n{_MINIMAX}<a>{a}{_MINIMAX}</a>\n'
        f"{_MINIMAX}<b>{b}{_MINIMAX}</b>\n{_MINIMAX}</invoke>\n"
    )


def _k2_horizon(a: int, b: int) -> str:
    return (
        f"<ifm|tool_call>add<ifm|arg_key>a</ifm|arg_key><ifm|arg_value>{a}</ifm|arg_value>"
        f"<ifm|arg_key>b</ifm|arg_key><ifm|arg_value>{b}</ifm|arg_value></ifm|tool_call>"
    )


def _kimi_k2(number: int, a: int, b: int) -> str:
    arguments = json.dumps({"a": a, "b": b})
    return (
        f"<|tool_call_begin|>functions.add:{number}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
    )


def _kimi_k3(a: int, b: int) -> str:
    def argument(name: str, value: int) -> str:
        return f'<|open|>argument key="{name}" type="number"<|sep|>{value}<|close|>argument<|sep|>'

    return (
        f'<|open|>call tool="add" index="{a}"<|sep|>{argument("a", a)}{argument("b", b)}'
        "<|close|>call<|sep|>"
    )


def _plamo(a: int, b: int) -> str:
    def mark(name: str) -> str:
        return f"<|plamo:{name}:plamo|>"

    name = f"{mark('begin_tool_name')}add{mark('end_tool_name')}"
    constraint = "<|plamo:constrain|>json<|plamo:msg|>"
    arguments = json.dumps({"a": a, "b": b})
    return (
        f"{mark('begin_tool_request')}{name}{mark('begin_tool_arguments')}{constraint}{arguments}"
        f"{mark('end_tool_arguments')}{mark('end_tool_request')}"
    )


def _muse(a: int, b: int) -> str:
    return (
        "<|start|>assistant to=tool.add<|message|><atem:function_calls>\n"
        f'<atem:invoke name="add">\n<atem:parameter name="a">{a}</atem:parameter>\n'
        f'<atem:parameter name="b">{b}</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls><|eom|>"
    )


def _step3(a: int, b: int) -> str:
    return (
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add">'
        f'<steptml:parameter name="a">{a}</steptml:parameter>'
        f'<steptml:parameter name="b">{b}</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜>"
    )


def _deepseek_v3(a: int, b: int) -> str:
    arguments = json.dumps({"a": a, "b": b})
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>"
    )


def _deepseek_v31(a: int, b: int) -> str:
    arguments = json.dumps({"a": a, "b": b})
    return f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def _inkling(a: int, b: int) -> str:
    call = json.dumps({"name": "add", "args": {"a": a, "b": b}})
    return f"<|message_model|><|content_invoke_tool_json|>{call}<|end_message|>"


def _apertus(a: int, b: int) -> str:
    return json.dumps({"add": {"a": a, "b": b}})


def _minicpm(a: int, b: int) -> str:
    return f'<function name="add"><param name="a">{a}</param><param name="b">{b}</param></function>'


def _hy_v4(a: int, b: int) -> str:
    return (
        f"<tool_call>add<arg_key>a</arg_key><arg_value>{a}</arg_value>"
        f"<arg_key>b</arg_key><arg_value>{b}</arg_value></tool_call>"
    )


_PYTHONIC = "[add(a=51, b=7), add(a=62, b=8)]"
_SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
# By the parser's name. A few parsers read one call alone, or calls alone.
TEXTS = {
    "apertus": f"I call. <|tools_prefix|>[{_two(_apertus, ', ')}]<|tools_suffix|>",
    "deepseek_v3": "I call. " + _SECTION.format(_two(_deepseek_v3, "\n")),
    "deepseek_v31": "I call. " + _SECTION.format(_two(_deepseek_v31)),
    "deepseek_v32": f"I call. {_dsml('function_calls')}",
    "deepseek_v4": f"I call. {_dsml('tool_calls')}",
    "deepseek_v41": f"I call. {_dsml('calls', ' ')}",
    "dots": f"I call. <dots_function_call>\n{_two(_invoke)}</dots_function_call>",
    "ernie45": f"I call. {_in('<tool_call>', '</tool_call>')}",
    "functiongemma": "I call. "
    + _two(
        lambda a, b: (
            f"<start_function_call>call:add{{a:<escape>{a}<escape>,b:<escape>{b}<escape>}}"
            "<end_function_call>"
        )
    ),
    "gemma4": "I call. "
    + _two(lambda a, b: f"<|tool_call>call:add{{a:{a},b:{b}}}<tool_call|>"),
    "gigachat3": f"I call. <|function_call|>{_json(51, 7)}",
    "glm45": f"I call. {_two(_keyed)}",
    "glm47": f"I call. {_two(_keyed)}",
    "granite": f"I call. <tool_call> {_json_list()}",
    "granite-20b-fc": _two(lambda a, b: f"<function_call> {_json(a, b)}"),
    "granite4": "I call. " + _two(lambda a, b: f"<tool_call>{_json(a, b)}</tool_call>"),
    "hermes": f"I call. {_in('<tool_call>', '</tool_call>')}",
    "hunyuan_a13b": f"I call. <tool_calls>{_json_list()}</tool_calls>",
    "hy_v3": "I call. <tool_calls>\n"
    + _two(lambda a, b: _keyed(a, b, "<tool_sep>"))
    + "</tool_calls>",
    "hy_v4": f"I call. <tool_calls>{_two(_hy_v4)}</tool_calls>",
    "inkling": f"<|content_text|>I call.<|end_message|>{_two(_inkling)}",
    "internlm": "I call. <|action_start|><|plugin|>"
    + _json(51, 7, "parameters")
    + "<|action_end|>",
    "jamba": f"I call. <tool_calls>{_json_list()}</tool_calls>",
    "k2_horizon": f"I call. <ifm|tool_calls>{_two(_k2_horizon)}</ifm|tool_calls>",
    "kimi_k2": "I call. <|tool_calls_section_begin|>"
    + _kimi_k2(0, 51, 7)
    + _kimi_k2(1, 62, 8)
    + "<|tool_calls_section_end|>",
    "kimi_k3": "I call. <|close|>response<|sep|><|open|>tools<|sep|>"
    + _two(_kimi_k3)
    + "<|close|>tools<|sep|>",
    "lfm2": f"I call. <|tool_call_start|>{_PYTHONIC}<|tool_call_end|>",
    "ling3": f"I call. {_two(_keyed)}",
    "llama3_json": _two(lambda a, b: _json(a, b, "parameters"), "; "),
    "llama4_json": _two(lambda a, b: _json(a, b, "parameters"), "; "),
    "llama4_pythonic": _PYTHONIC,
    "longcat": f"I call. {_in('<longcat_tool_call>', '</longcat_tool_call>')}",
    "mimo": f"I call. {_xml()}",
    "minicpm5": f"I call. {_two(_minicpm)}",
    "minimax_m2": f"I call. <minimax:tool_call>{_two(_invoke)}</minimax:tool_call>",
    "minimax_m3": f"I call. {_MINIMAX}<tool_call>\n{_two(_minimax)}{_MINIMAX}</tool_call>",
    "mistral": "I call. "
    + _two(lambda a, b: f"[TOOL_CALLS]add[ARGS]{json.dumps({'a': a, 'b': b})}"),
    "muse_glimmer": _two(_muse),
    "olmo3": "<function_calls>add(a=51, b=7)\nadd(a=62, b=8)</function_calls>",
    "phi4_mini_json": f"I call. functools{_json_list()}",
    "plamo3": "I call. <|plamo:begin_tool_requests:plamo|>"
    + _two(_plamo)
    + "<|plamo:end_tool_requests:plamo|>",
    "poolside_v1": f"I call. {_two(_keyed)}",
    "pythonic": _PYTHONIC,
    "qwen3_coder": f"I call. {_xml()}",
    "qwen3_json": f"I call. {_in('<tool_call>', '</tool_call>')}",
    "qwen3_xml": f"I call. {_xml()}",
    "seed_oss": f"I call. {_xml('<seed:tool_call>', '</seed:tool_call>')}",
    "step3": f"I call. <｜tool_calls_begin｜>{_two(_step3)}<｜tool_calls_end｜>",
    "step3p5": f"I call. {_xml()}",
    "xlam": f"I call. [TOOL_CALLS]{_json_list()}",
}


def marks(known: Collection[str]) -> list[str]:
    """Returns the tokens that the parsers look for, without those in `known`."""
    in_texts = {mark for text in TEXTS.values() for mark in _MARK.findall(text)}
    return sorted({*in_texts, *_FURTHER_MARKS} - set(known))
