"""Reward models behind vLLM's endpoint, and what happens when they give no score."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from slipstream.client.environment import Reply
from slipstream.core.errors import ConfigError
from slipstream.environments.judge import JudgeError
from slipstream.environments.judged import Rewarded, RewardModel

pytest.importorskip("openai")

ASKED = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]


class Classifier:
    """Answers `/classify` with what `answers` hold, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str] = []
        classifier = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                classifier.asked.append((self.path, json.loads(body)))
                classifier.keys.append(self.headers["authorization"])
                answers = classifier.answers
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                status, said = answer if isinstance(answer, tuple) else (200, answer)
                data = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def classifier() -> Iterator[Classifier]:
    made = Classifier()
    yield made
    made.close()


def outputs(*values: float) -> dict[str, Any]:
    return {"data": [{"index": 0, "probs": list(values), "num_classes": len(values)}]}


async def test_the_score_is_the_output_of_the_chosen_label(classifier: Classifier) -> None:
    classifier.answers = [outputs(-3.5), outputs(0.1, 0.9)]
    assert await RewardModel(classifier.url, "reward", api_key="k").score(ASKED) == -3.5
    model = RewardModel(classifier.url, "reward", label=1, as_probability=True)
    assert await model.score(ASKED) == 0.9
    body = {"model": "reward", "messages": ASKED}
    assert classifier.asked == [
        ("/classify", body | {"use_activation": False}),
        ("/classify", body | {"use_activation": True}),
    ]
    assert classifier.keys[0] == "Bearer k"


async def test_what_may_pass_is_asked_again(classifier: Classifier) -> None:
    classifier.answers = [(503, {}), (500, {}), outputs(2.0)]
    assert await RewardModel(classifier.url, "reward").score(ASKED) == 2.0
    assert len(classifier.asked) == 3


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ((400, {"error": {"message": "too long"}}), "failed: BadRequestError: .*too long"),
        ((503, {}), "failed: InternalServerError"),
        (outputs(), "has 0 outputs, no number 0"),
        (outputs(float("nan")), "must give a finite number, got nan"),
        ({"data": []}, "must answer as vLLM's /classify does"),
        ({"data": [{"probs": ["x"]}]}, "must answer as vLLM's /classify does"),
        ({"choices": []}, "must answer as vLLM's /classify does"),
    ],
)
async def test_a_reward_model_without_a_score_is_a_failure_with_its_cause(
    answer: Any, cause: str, classifier: Classifier
) -> None:
    classifier.answers = [answer]
    model = RewardModel(classifier.url, "reward", api_key="a secret", max_retries=1)
    with pytest.raises(JudgeError, match=cause) as failed:
        await model.score(ASKED)
    assert str(failed.value).startswith(f"the reward model reward at {classifier.url}")
    assert "\n" not in str(failed.value)
    assert "a secret" not in str(failed.value)


async def test_a_rewarded_environment_scores_question_and_reply(
    classifier: Classifier, tmp_path: Path
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"topic": "red"}\n')
    classifier.answers = [outputs(1.25)]
    environment = Rewarded(
        str(path), classifier.url, "reward", question="topic", instruction="What is {question}?"
    )
    (message,) = environment.reset(environment.tasks()[0])
    found = await environment.step(Reply("<think>hm</think>a colour", content="a colour"))
    assert (found.reward, found.done, message.content) == (1.25, True, "What is red?")
    assert classifier.asked[0][1]["messages"] == [
        {"role": "user", "content": "What is red?"},
        {"role": "assistant", "content": "a colour"},
    ]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"label": -1}, "label must be at least 0, got -1"),
        ({"max_open": 0}, "max_open must be at least 1, got 0"),
        ({"timeout_s": 0}, "timeout_s must be above 0, got 0"),
        ({"max_retries": -1}, "max_retries must be at least 0, got -1"),
        ({"instruction": "x"}, "instruction must contain {question}, got 'x'"),
        ({"question": "q"}, "row 1: column 'q' must hold a text; the columns are 'question'"),
    ],
)
def test_a_rewarded_environment_says_what_cannot_work(
    options: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "a"}\n')
    with pytest.raises(ConfigError) as refused:
        Rewarded(str(path), "http://127.0.0.1:1/v1", "reward", **options)
    assert cause in str(refused.value)
