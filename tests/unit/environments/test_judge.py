"""Judges: models behind an endpoint that score replies, and what happens when they do not."""

import asyncio
import contextlib
import gzip
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slipstream.client.environment import Reply
from slipstream.client.episode_host import EpisodeHost
from slipstream.core.errors import ConfigError
from slipstream.environments.judge import (
    Judge,
    Judged,
    JudgeError,
    Rewarded,
    RewardModel,
)
from slipstream.v1 import environment_pb2 as pb
from support.rigs.waiting import LIMIT_S, until

pytest.importorskip("openai")

PROMPT = "From 0 to 10, how good is {reply}?"


class Endpoint:
    """A server with OpenAI's API that answers from a list: a text, a status, or what it does."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.paths: list[str] = []
        self.encodings: list[str] = []
        self.at_s: list[float] = []
        self.open = self.most_open = 0
        self.hold = threading.Event()
        self.hold.set()
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                endpoint.answer(self, json.loads(body))

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def answer(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self._lock:
            self.asked.append(body)
            self.keys.append(request.headers["authorization"])
            self.paths.append(request.path)
            self.encodings.append(request.headers["accept-encoding"])
            self.at_s.append(time.monotonic())
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.hold.wait(LIMIT_S)
        with self._lock:
            self.open -= 1
        if answer is None:
            request.connection.close()
            return
        if callable(answer):
            with contextlib.suppress(OSError):
                answer(request)
            return
        status = 200
        headers = {}
        content = answer
        reason = "stop"
        if isinstance(answer, tuple):
            status, headers, content, reason = answer
        choice = {
            "index": 0,
            "finish_reason": reason,
            "message": {"role": "assistant", "content": content},
        }
        reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        said = json.dumps(reply | {"choices": [choice]}).encode()
        request.send_response(status)
        for name, value in ({"content-length": str(len(said))} | headers).items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(said)

    def close(self) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


def failure(status: int, **headers: str) -> tuple[int, dict[str, str], str, str]:
    return (
        status,
        {name.replace("_", "-"): value for name, value in headers.items()},
        "",
        "stop",
    )


def judge(endpoint: Endpoint, **options: Any) -> Judge:
    return Judge(endpoint.url, "judge", prompt=PROMPT, **options)


async def score(endpoint: Endpoint, said: Any, **options: Any) -> float:
    endpoint.answers = said if isinstance(said, list) else [said]
    return await judge(endpoint, **options).score({"reply": "{score} {reply}"})


async def test_a_judge_reads_the_prompt_with_its_fields_and_gives_a_number(endpoint):
    assert await score(endpoint, "It is good.\nScore: 7.5\n", api_key="a key") == 7.5
    (request,) = endpoint.asked
    # The text of a reply is no field of the prompt.
    assert request["messages"] == [
        {"role": "user", "content": "From 0 to 10, how good is {score} {reply}?"}
    ]
    assert (request["model"], request["temperature"]) == ("judge", 0)
    assert endpoint.keys == ["Bearer a key"]
    # Few compressed bytes may stand for any number of others.
    assert endpoint.encodings == ["identity"]


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {"temperature": 0, "max_tokens": 1024}),
        ({"max_tokens": 9}, {"temperature": 0, "max_tokens": 9}),
        # The limit that OpenAI's reasoning models take.
        (
            {"request": {"max_completion_tokens": 9, "temperature": None}},
            {"max_completion_tokens": 9},
        ),
        (
            {"request": {"temperature": np.float32(0.5), "reasoning_effort": "low"}},
            {"temperature": 0.5, "max_tokens": 1024, "reasoning_effort": "low"},
        ),
    ],
)
async def test_fields_of_the_request_are_the_users(
    options: dict, fields: dict, endpoint
) -> None:
    assert await score(endpoint, "7", **options) == 7
    (request,) = endpoint.asked
    assert {
        name: value
        for name, value in request.items()
        if name not in ("model", "messages")
    } == (fields)


@pytest.mark.parametrize(
    ("said", "number"), [("7", 7), ("9\n\nScore: .5", 0.5), ("+1e0", 1), ("**8**", 8)]
)
async def test_the_number_of_the_last_line_counts(said, number, endpoint):
    assert await score(endpoint, said) == number


async def test_an_object_counts_from_its_first_to_its_last_brace(
    endpoint: Endpoint,
) -> None:
    message = 'So: ```json\n{"why": "a {b}", "score": 3}\n``` 9'
    assert await score(endpoint, message, answer="json") == 3


@pytest.mark.parametrize(
    ("said", "options", "cause"),
    [
        ("Good!", {}, "must reply with one number on its last line, got 'Good!'"),
        ("7\nwell done", {}, "must reply with one number on its last line"),
        ("", {}, "must reply with one number on its last line, got ''"),
        ("7/10", {}, "must reply with one number on its last line, got '7/10'"),
        ("3-4", {}, "must reply with one number on its last line, got '3-4'"),
        ("11", {}, "must score from 0 to 10, got 11"),
        ("-1", {}, "must score from 0 to 10, got -1"),
        ("1e999", {}, "must score from 0 to 10, got inf"),
        (
            "7",
            {"answer": "json"},
            "must reply with an object with the number `score`, got '7'",
        ),
        ('{"score": "7"}', {"answer": "json"}, "must reply with an object"),
        ('{"score": true}', {"answer": "json"}, "must reply with an object"),
        ('{"score": NaN}', {"answer": "json"}, "must score from 0 to 10, got nan"),
        (
            f'{{"score": 1{"0" * 400}}}',
            {"answer": "json"},
            "must score from 0 to 10, got 1000",
        ),
        (
            (200, {}, "7 but", "length"),
            {},
            "was cut off at 1024 tokens: raise max_tokens",
        ),
        (
            (200, {}, "7 but", "length"),
            {"request": {"max_completion_tokens": 9}},
            "was cut off at 9 tokens: raise max_completion_tokens",
        ),
        (
            (200, {}, "7 but", "length"),
            {"request": {"max_tokens": None}},
            "was cut off at its own limit",
        ),
        (failure(400), {}, "failed: BadRequestError"),
        (failure(401), {}, "failed: AuthenticationError"),
        (failure(503), {"max_retries": 1}, "failed: InternalServerError"),
        (None, {"max_retries": 0}, "failed: APIConnectionError"),
    ],
)
async def test_a_judge_without_a_score_is_a_failure_with_its_cause(
    said, options, cause, endpoint
):
    with pytest.raises(JudgeError) as failed:
        await score(endpoint, said, api_key="a secret", **options)
    assert f"the judge judge at {endpoint.url}" in str(failed.value)
    assert cause in str(failed.value)
    assert "a secret" not in str(failed.value)
    assert "\n" not in str(failed.value)


async def test_what_may_pass_is_asked_again_and_as_late_as_the_judge_says(endpoint):
    later = failure(503, retry_after="0.1"), failure(429, retry_after="1")
    answers = [None, failure(500), plain(b"<html>"), *later, "6"]
    assert await score(endpoint, answers) == 6
    assert len(endpoint.asked) == 6
    assert endpoint.at_s[5] - endpoint.at_s[4] >= 1


async def test_a_judge_that_is_silent_is_given_up(endpoint: Endpoint) -> None:
    endpoint.hold.clear()
    with pytest.raises(JudgeError, match="APITimeoutError"):
        await score(endpoint, "1", timeout_s=0.2, max_retries=1)
    assert len(endpoint.asked) == 2


def plain(body, status=200, **headers):
    """Answers with these bytes and headers, as JSON unless they say otherwise."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        settings = {
            "content_type": "application/json",
            "content_length": str(len(body)),
        } | headers
        for name, value in settings.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def endless(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("content-type", "application/json")
    request.end_headers()
    while True:
        request.wfile.write(b" " * 65536)


def dripping(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("content-length", "100000")
    request.end_headers()
    for _ in range(600):
        request.wfile.write(b" ")
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (dripping, "failed: APITimeoutError: .* no whole answer within 1 s"),
        (endless, "failed: APIConnectionError: .* more than 4194304 bytes"),
        (plain(gzip.compress(b" " * 100), content_encoding="gzip"), "encoded as gzip"),
        (plain(b"<html>", content_type="text/html"), "is no JSON: JSONDecodeError"),
        (
            plain(b'{"choices":' + b"[" * 200_000),
            "no JSON: (RecursionError|JSONDecodeError)",
        ),
        (plain(b"\xff"), "is no JSON: UnicodeDecodeError"),
        (plain(b""), "is no JSON: JSONDecodeError"),
        (plain(b"null"), "must answer as OpenAI's chat completions do, got 'None'"),
        (plain(b"[]"), "must answer as OpenAI's chat completions do"),
        (plain(b'{"choices": 5}'), "must answer as OpenAI's chat completions do"),
        (plain(b'{"choices": []}'), "must answer as OpenAI's chat completions do"),
        (
            plain(b'{"choices": [{"message": {"content": 7}}]}'),
            "must answer as OpenAI's",
        ),
        # The judge's reply has thoughts alone.
        (plain(b'{"choices": [{"message": {}}]}'), "must reply with one number"),
        (
            plain(b'{"choices": [{"message": {}, "finish_reason": "length"}]}'),
            "was cut off at",
        ),
        (
            plain(b'{"choices": [{"message": {"content": null}}]}'),
            "must reply with one number",
        ),
    ],
)
async def test_a_judge_that_answers_with_anything_is_a_failure_with_its_name(
    answer: Any, cause: str, endpoint: Endpoint
) -> None:
    with pytest.raises(JudgeError, match=cause) as failed:
        await asyncio.wait_for(score(endpoint, answer, timeout_s=1, max_retries=0), 60)
    assert str(failed.value).startswith(f"the judge judge at {endpoint.url} ")
    assert "\n" not in str(failed.value)


async def test_a_redirection_is_not_followed(endpoint: Endpoint) -> None:
    other = Endpoint()
    try:
        other.answers = ["7"]
        moved = (307, {"location": f"{other.url}/chat/completions"}, "", "stop")
        with pytest.raises(JudgeError, match="Error code: 307"):
            await score(endpoint, moved)
        assert not other.asked
    finally:
        other.close()


async def test_a_judge_has_no_more_calls_open_than_it_may(endpoint: Endpoint) -> None:
    endpoint.answers = ["5"]
    endpoint.hold.clear()
    one_judge = judge(endpoint, max_open=3)
    calls = [
        asyncio.create_task(one_judge.score({"reply": str(number)}))
        for number in range(12)
    ]
    await until(lambda: endpoint.open >= 3, 60)
    endpoint.hold.set()
    assert await asyncio.gather(*calls) == [5] * 12
    assert endpoint.most_open == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"answer": "words"}, "answer must be 'number' or 'json', got 'words'"),
        (
            {"lowest": 1.0, "highest": 1.0},
            "lowest must be below highest, got 1.0 and 1.0",
        ),
        ({"max_open": 0}, "max_open must be at least 1, got 0"),
        (
            {"request": {"stream": True}},
            "request must be without 'stream', which the judge sets",
        ),
        (
            {"request": {"stop": {"a"}}},
            "request must be a JSON object: {'a'} is no value of JSON",
        ),
        ({"request": [1]}, "request must be "),
        ({"max_retries": -1}, "max_retries must be at least 0, got -1"),
        ({"timeout_s": 0.0}, "timeout_s must be above 0, got 0.0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", "\\(")):
        Judge("http://127.0.0.1:1/v1", "m", prompt=PROMPT, **options)
    with pytest.raises(ConfigError, match="prompt must name a field"):
        Judge("http://127.0.0.1:1/v1", "m", prompt="How good?")


def questions(folder: Path) -> str:
    path = folder / "questions.jsonl"
    path.write_text('{"question": "Name a colour.", "wanted": ["red", "blue"]}\n')
    return str(path)


async def test_a_judged_environment_gives_the_judges_score_from_0_to_1(
    tmp_path, endpoint
):
    key = tmp_path / "key"
    key.write_text("a key\n")
    endpoint.answers = ["The reply is red. 4"]
    judged = Judged(
        questions(tmp_path),
        endpoint.url,
        "judge",
        "{question} Allowed: {wanted}. Reply: {reply}. From 2 to 6?",
        api_key_file=str(key),
        lowest=2,
        highest=6,
    )
    (message,) = judged.reset(judged.tasks()[0])
    assert message.content == "Name a colour."
    result = await judged.step("red")
    assert (result.reward, result.metrics) == (0.5, {"score": 4})
    content = endpoint.asked[0]["messages"][0]["content"]
    assert (
        content == 'Name a colour. Allowed: ["red", "blue"]. Reply: red. From 2 to 6?'
    )
    assert endpoint.keys == ["Bearer a key"]


async def test_a_judge_sees_the_answer_alone_and_nothing_is_asked_of_an_empty_one(
    tmp_path, endpoint
):
    endpoint.answers = ["4"]
    judged = Judged(questions(tmp_path), endpoint.url, "judge", "{reply}. From 2 to 6?",
                    lowest=2, highest=6)  # fmt: skip
    judged.reset(judged.tasks()[0])
    assert (await judged.step("<think>blue?</think>\n\nred")).reward == 0.5
    assert endpoint.asked[0]["messages"][0]["content"] == "red. From 2 to 6?"
    for reply in ("", " \n", "<think>red", "<think>red</think>"):
        result = await judged.step(reply)
        assert (result.reward, result.metrics) == (0.0, {"score": 2})
    assert len(endpoint.asked) == 1


async def test_thoughts_of_a_judge_are_no_score(endpoint: Endpoint) -> None:
    thinks = '<think>{"score": 9}? No.</think>{"score": 3}'
    assert await score(endpoint, thinks, answer="json") == 3
    with pytest.raises(JudgeError, match="must reply with one number"):
        await score(endpoint, "<think>So 7")


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Judged, {"rubric": "x"}, "rubric must contain {reply}, got 'x'"),
        (
            Judged,
            {"rubric": "{reply} {queston}"},
            "rubric names {queston}; did you mean 'questi",
        ),
        (Judged, {"instruction": "x"}, "instruction must contain {question}, got 'x'"),
        (
            Judged,
            {"question": "q"},
            "row 1 has no column 'q'; its columns are 'question'",
        ),
        (
            Rewarded,
            {"question": "q"},
            "row 1 has no column 'q'; its columns are 'question'",
        ),
        (Rewarded, {"label": -1}, "label must be at least 0, got -1"),
        (Judged, {"api_key_file": "/missing"}, "api_key_file /missing cannot be read"),
        (
            Judged,
            {"api_key_file": "/dev/null"},
            "api_key_file /dev/null cannot be read: ",
        ),
    ],
)
def test_an_environment_with_a_judge_says_what_cannot_work(
    kind, options, said, tmp_path
):
    arguments = options if kind is Rewarded else {"rubric": "{reply}", **options}
    with pytest.raises(ConfigError) as refused:
        kind(questions(tmp_path), "http://127.0.0.1:1/v1", "m", **arguments)
    assert said in str(refused.value)


ASKED = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]


def classes(
    said: object, status: int = 200
) -> Callable[[BaseHTTPRequestHandler], None]:
    return plain(json.dumps(said).encode(), status)


def outputs(*values: float) -> Callable[[BaseHTTPRequestHandler], None]:
    return classes(
        {"data": [{"index": 0, "probs": list(values), "num_classes": len(values)}]}
    )


async def test_the_score_is_the_output_of_the_chosen_label(endpoint: Endpoint) -> None:
    endpoint.answers = [outputs(-3.5), outputs(0.1, 0.9)]
    assert await RewardModel(endpoint.url, "reward", api_key="k").score(ASKED) == -3.5
    model = RewardModel(endpoint.url, "reward", label=1, as_probability=True)
    assert await model.score(ASKED) == 0.9
    body = {"model": "reward", "messages": ASKED}
    assert endpoint.asked == [
        body | {"use_activation": is_so} for is_so in (False, True)
    ]
    assert endpoint.paths == ["/classify"] * 2
    assert endpoint.keys[0] == "Bearer k"


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (
            classes({"error": {"message": "too long"}}, 400),
            "failed: BadRequestError: .*too long",
        ),
        (classes({}, 503), "failed: InternalServerError"),
        (outputs(), "has 0 outputs, no number 0"),
        (outputs(float("nan")), "must give a finite number, got nan"),
        (classes({"data": []}), "must answer as vLLM's /classify does"),
        (classes({"data": [{"probs": ["x"]}]}), "must answer as vLLM's /classify does"),
        (classes({"choices": []}), "must answer as vLLM's /classify does"),
    ],
)
async def test_a_reward_model_without_a_score_is_a_failure_with_its_cause(
    answer, cause, endpoint
):
    endpoint.answers = [answer]
    model = RewardModel(endpoint.url, "reward", api_key="a secret", max_retries=1)
    with pytest.raises(JudgeError, match=cause) as failed:
        await model.score(ASKED)
    assert str(failed.value).startswith(f"the reward model reward at {endpoint.url}")
    assert "\n" not in str(failed.value)
    assert "a secret" not in str(failed.value)


async def test_a_rewarded_environment_scores_question_and_reply(endpoint, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"topic": "red"}\n')
    endpoint.answers = [outputs(1.25)]
    environment = Rewarded(
        str(path),
        endpoint.url,
        "reward",
        question="topic",
        instruction="What is {question}?",
    )
    (message,) = environment.reset(environment.tasks()[0])
    result = await environment.step(
        Reply("<think>hm</think>a colour", content="a colour")
    )
    assert (result.reward, result.done, message.content) == (1.25, True, "What is red?")
    assert endpoint.asked[0]["messages"] == [
        {"role": "user", "content": "What is red?"},
        {"role": "assistant", "content": "a colour"},
    ]


async def test_a_failure_names_the_line_of_an_environment_and_not_one_of_our_own(
    tmp_path,
) -> None:
    environment = Judged(
        questions(tmp_path), "http://127.0.0.1:9/v1", "m", "{reply}", max_retries=0
    )
    host = EpisodeHost(environment)
    await host.answer(pb.WorkerCommand(reset={"episode_key": "a"}))
    message = (
        await host.answer(pb.WorkerCommand(step={"episode_key": "a", "reply": "x"}))
    ).failure
    assert re.search(r"APIConnectionError: .* \(judge\.py:\d+ in ", message.message)
