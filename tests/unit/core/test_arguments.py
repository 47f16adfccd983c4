import asyncio
import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import numpy as np
import pytest
import slipstream
import torch
from pydantic import Field
from slipstream.client import Client
from slipstream.core.arguments import AboveZero, Count, Patience, checked
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.environments.command import Command
from slipstream.environments.demonstrations import Demonstrations
from slipstream.environments.echo import Echo
from slipstream.environments.judge import Judge, Judged, Rewarded, RewardModel
from slipstream.environments.questions import Questions
from slipstream.environments.sandbox import Limits, Sandbox, sandbox

from deploy.environments.arithmetic import Arithmetic
from deploy.environments.functions import Functions

URL = "http://127.0.0.1:9/v1"
HUGE = 10**400
VALUES = (
    None,
    True,
    3,
    -1,
    0,
    2.5,
    math.nan,
    math.inf,
    -math.inf,
    HUGE,
    "",
    "x",
    "a\nb",
    b"x",
    "\ud800",
    "a\0b",
    Path("/x"),
    np.int64(3),
    np.float32(2.5),
    np.str_("x"),
    np.bool_(True),
    [],
    [1],
    (),
    {},
    {"a": 1},
    object(),
    Echo,
)


class Options(TypedDict, total=False):
    most: Count


@checked
def example(
    path: str | Path = "",
    *,
    limit: Count | None = None,
    rate: Annotated[float, Field(ge=0, le=1)] = 0.0,
    wait_s: Patience = 0.0,
    time_s: AboveZero = 1.0,
    split: Literal["train", "all"] = "all",
    names: Sequence[str] = (),
    files: Mapping[str, str | bytes] | None = None,
    echo: Echo | None = None,
    sure: bool = False,
    text: str = "",
    call: Callable[..., object] | None = None,
    **options: Unpack[Options],
) -> tuple[object, ...]:
    return (path, limit, rate, sure, text, options)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": 3}, "path must be a text or an instance of Path, got 3"),
        ({"path": b"x"}, "path must be a text or an instance of Path, got b'x'"),
        ({"path": "a\0b"}, "path must be without surrogates and NUL, got"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"limit": True}, "limit must be a whole number, got True"),
        ({"limit": np.float32(2.5)}, "limit must be a whole number, got 2.5"),
        ({"limit": HUGE}, "limit must be at most 2147483647, got 1000"),
        ({"rate": 1.5}, "rate must be at most 1, got 1.5"),
        ({"rate": math.nan}, "rate must be a finite number, got nan"),
        ({"wait_s": -1}, "wait_s must be at least 0, got -1"),
        ({"time_s": 0}, "time_s must be above 0, got 0"),
        ({"time_s": math.inf}, r"time_s must be a finite number, got inf"),
        ({"split": "test"}, "split must be 'train' or 'all', got 'test'"),
        ({"names": "train"}, "names must be a list, got 'train'"),
        ({"names": ["a", 3]}, r"names, number 2, must be a text, got 3"),
        ({"files": {"a": 3}}, "files must be a text or a valid bytes, got 3"),
        ({"echo": Echo}, "echo must be an instance of Echo, got <class"),
        ({"sure": "no"}, "sure must be a valid boolean, got 'no'"),
        ({"text": None}, "text must be a text, got None"),
        ({"text": "\ud800"}, "text must be without surrogates and NUL, got '.ud800'"),
        ({"most": 0}, "most must be at least 1, got 0"),
    ],
)
def test_an_argument_that_the_signature_excludes_is_named(given, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        example(**given)


def test_values_of_the_signature_and_scalars_of_numpy_and_torch_are_passed_on() -> None:
    path, limit, rate, sure, text, options = example(
        np.str_("x"),
        limit=np.int64(3),
        rate=torch.tensor(0.5),
        wait_s=math.inf,
        names=(np.str_("a"),),
        sure=np.bool_(True),
        text=np.str_("é"),
        most=np.array(2),
        call=print,
    )
    assert (path, limit, rate, sure, text, options) == (
        "x",
        3,
        0.5,
        True,
        "é",
        {"most": 2},
    )
    assert [type(value) for value in (path, limit, rate, sure, text)] == [
        str,
        int,
        float,
        bool,
        str,
    ]


def test_names_and_number_of_arguments_are_pythons_own_matter() -> None:
    with pytest.raises(
        TypeError, match="takes from 0 to 1 positional arguments but 2 were given"
    ):
        example("a", 3)  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'lmit'"):
        Echo(lmit=3)  # type: ignore[call-arg]


async def test_a_coroutine_is_refused_where_it_is_awaited() -> None:
    @checked
    async def wait(limit: Count) -> int:
        return limit

    assert inspect.iscoroutinefunction(wait)
    assert await wait(np.int64(3)) == 3
    call = wait(0)
    with pytest.raises(ConfigError, match="limit must be at least 1, got 0"):
        await call


async def _call(method: str, given: Mapping[str, Any]) -> None:
    async with Client("127.0.0.1:9", reconnect_timeout_s=0) as client:
        called = getattr(client, method)(**given)
        if hasattr(called, "__anext__"):
            await anext(called)
        # A call that waits for ever has taken its arguments.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(called, 0.2)


def _of_client(method: str, **given: object) -> tuple[object, ...]:
    names = [*inspect.signature(getattr(Client, method)).parameters][1:]
    return method, lambda **given: asyncio.run(_call(method, given)), given, names


def _limited(**given: Any) -> None:
    Sandbox(Limits(**given))


def _of(
    function: Callable[..., object], more: Sequence[str] = (), **given: object
) -> object:
    parameters = inspect.signature(function).parameters.values()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    return getattr(function, "__qualname__", "x"), function, given, [*names, *more]


@pytest.mark.parametrize(
    ("name", "function", "given", "names"),
    [
        _of_client("submit", reference="a:B"),
        _of_client("serve", environment=Echo(), connect_timeout_s=0),
        _of_client("stop", reason="x"),
        _of_client("drain", server_id="s", reason="x"),
        _of_client("watch"),
        _of(Client, address="127.0.0.1:9"),
        _of(Client.of_run),
        _of(slipstream.run, ["model", "sampling", "algorithm"], environments=None),
        _of(Echo),
        _of(Questions, path=[{"question": "1 + 1", "answer": "2"}], judge="exact"),
        _of(Demonstrations, path="demonstrations.jsonl"),
        _of(Command, command=["true", "{task}"], tasks=["a"], score_file="s"),
        _of(Judge, ["max_open", "timeout_s"], base_url=URL, prompt="{reply}"),
        _of(
            Judged,
            ["lowest"],
            path="rows.jsonl",
            base_url=URL,
            model="m",
            rubric="{reply}",
        ),
        _of(RewardModel, ["max_retries"], base_url=URL, model="m"),
        _of(Rewarded, ["label"], path="rows.jsonl", base_url=URL, model="m"),
        _of(partial(Functions, "functions.jsonl")),
        _of(partial(Arithmetic, num_tasks=3)),
        _of(Sandbox),
        (
            "Limits",
            _limited,
            {},
            [*inspect.signature(Limits).parameters],
        ),
    ],
)
def test_no_argument_of_any_kind_is_answered_by_an_error_of_python(
    name, function, given, names, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sandbox, "trial", lambda backend: sandbox.Trial("", bounds_threads=True)
    )
    Path("rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    Path("functions.jsonl").write_text(
        '{"question": "Write f(x).", "tests": "assert f(1) == 2"}\n'
    )
    Path("demonstrations.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    for argument in names:
        for value in VALUES:
            # A run of the settings themselves would begin.
            with contextlib.suppress(SlipstreamError):
                function(**{**given, argument: value})
