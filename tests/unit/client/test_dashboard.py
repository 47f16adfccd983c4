"""The dashboard answers requests of this machine alone, and only with what runs wrote."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.client.dashboard import server
from slipstream.client.dashboard.server import RunFolders, UnknownRun, open_dashboard, save_run
from slipstream.core.errors import ConfigError


def a_run(folder: Path, name: str, *rows: dict) -> Path:
    run = folder / name
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "no-run").mkdir()
    a_run(folder, "one", {"step": 0, "reward_mean": 0.5})
    (tmp_path / "metrics.jsonl").write_text('{"secret": 1}\n')
    return folder


@pytest.fixture
def port(runs: Path) -> Iterator[int]:
    with open_dashboard(runs, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def get(port: int, path: str, *, host: str = "127.0.0.1", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Host": f"{host}:{port}"})
    answer = connection.getresponse()
    assert answer.status >= 400 or "default-src 'none'" in str(
        answer.headers["Content-Security-Policy"]
    )
    return answer.status, answer.read().decode()


def test_rows_are_read_from_where_the_last_answer_ended(runs: Path) -> None:
    reader, path = RunFolders(runs), runs / "one" / "metrics.jsonl"
    first = reader.metrics("one", 0)
    assert [row["step"] for row in first.rows] == [0]
    with path.open("a") as file:
        file.write('{"step": 1}\n{"step": 2, "half')
    second = reader.metrics("one", first.end)
    assert [row["step"] for row in second.rows] == [1]
    with path.open("a") as file:
        file.write('": 3}\n')
    assert reader.metrics("one", second.end).rows == [{"step": 2, "half": 3}]


def test_long_files_come_in_parts(runs: Path) -> None:
    text = "x" * (server.MOST_BYTES // 8)
    a_run(runs, "long", *({"step": number, "text": text} for number in range(20)))
    found, end, is_all = [], 0, False
    end = len((runs / "long" / "metrics.jsonl").read_text().partition("\n")[0]) + 1
    while not is_all:
        part = RunFolders(runs).metrics("long", end)
        assert len(part.rows) < 19
        found += [row["step"] for row in part.rows]
        end, is_all = part.end, part.is_all
    assert found == list(range(1, 20))


def test_trajectories_are_those_of_the_newest_step_unless_one_is_named(runs: Path) -> None:
    rows = [{"step": step, "reply": f"{step}-{n}"} for step in (0, 10) for n in range(2)]
    # Those of no step are not shown.
    rows += [{}, {"step": "a"}, {"step": None}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (runs / "one" / "trajectories.jsonl").write_text(text)
    newest = RunFolders(runs).trajectories("one", None)
    assert newest["steps"] == [0, 10]
    assert [row["reply"] for row in newest["trajectories"]] == ["10-0", "10-1"]
    first = RunFolders(runs).trajectories("one", 0)
    assert [row["reply"] for row in first["trajectories"]] == ["0-0", "0-1"]
    assert RunFolders(runs).trajectories("one", 5)["trajectories"] == []


def test_a_run_that_was_just_started_has_no_trajectories_summary_or_log(runs: Path) -> None:
    empty = {"steps": [], "step": None, "trajectories": []}
    assert RunFolders(runs).trajectories("one", None) == empty
    assert RunFolders(runs).about("one") == {"summary": {}, "log": []}
    assert "state" not in RunFolders(runs).overview()[0]


def test_only_a_run_whose_task_is_solved_says_so(runs: Path) -> None:
    for solved, told in ((True, {"solved": True, "steps": 3}), (False, {"steps": 3})):
        summary = {"solved": solved, "steps": 3}
        (runs / "one" / "summary.json").write_text(json.dumps(summary))
        assert RunFolders(runs).about("one")["summary"] == told


def test_suspended_environments_are_told_while_a_run_goes_on_and_when_it_has_ended(runs):
    assert RunFolders(runs).overview()[0]["suspended_environments"] == {}
    (runs / "one" / "suspended.json").write_text('{"e": "KeyError: 1"}')
    assert RunFolders(runs).overview()[0]["suspended_environments"] == {"e": "KeyError: 1"}
    (runs / "one" / "summary.json").write_text('{"suspended_environments": {"f": "gone"}}')
    assert RunFolders(runs).overview()[0]["suspended_environments"] == {"f": "gone"}


def test_the_folder_may_be_that_of_one_run(runs: Path) -> None:
    assert RunFolders(runs).runs() == RunFolders(runs / "one").runs() == [runs / "one"]
    assert RunFolders(runs / "one").metrics("one", 0).rows


@pytest.mark.parametrize("name", ["..", ".", "no-run", "other", "../runs/one", "/etc"])
def test_nothing_outside_the_folder_of_runs_is_read(runs: Path, name: str) -> None:
    with pytest.raises(UnknownRun):
        RunFolders(runs).metrics(name, 0)


def test_the_page_and_its_data_are_served(port: int) -> None:
    for path in ("/", "/page.js", "/chart.js", "/page.css"):
        assert get(port, path)[0] == 200
    assert json.loads(get(port, "/api/runs")[1])[0]["name"] == "one"
    assert json.loads(get(port, "/api/runs/one/metrics?from=0")[1])["rows"][0]["step"] == 0
    assert get(port, "/api/runs/one/about")[0] == 200
    assert get(port, "/", host="localhost")[0] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs/..%2f/metrics", 404),
        ("/api/runs/../metrics", 404),
        ("/api/runs/one/config", 404),
        ("/../pyproject.toml", 404),
        ("/api/runs/one/metrics?from=-1", 400),
        ("/api/runs/one/metrics?from=99999999999999999999", 400),
        ("/api/runs/one/trajectories?step=x", 400),
    ],
)
def test_other_requests_are_refused(port: int, path: str, status: int) -> None:
    assert get(port, path)[0] == status


def test_a_page_of_the_web_cannot_ask_through_a_name_of_its_own(port: int) -> None:
    assert get(port, "/api/runs", host="attacker.example")[0] == 403


def test_nothing_but_reading_is_offered(port: int) -> None:
    assert get(port, "/api/runs", method="POST")[0] == 501


def test_the_pages_scripts_make_no_markup_of_what_models_wrote() -> None:
    for path in Path(server.__file__).parent.glob("*.js"):
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert sink not in path.read_text(), path.name


def test_the_page_has_each_place_that_its_script_fills() -> None:
    folder = Path(server.__file__).parent
    named = set(re.findall(r'byId\("(\w+)"\)', (folder / "page.js").read_text()))
    assert {"waiting", "unended"} <= named
    # A page that was sent has its data there.
    assert named - {"given"} <= set(re.findall(r'id="(\w+)"', (folder / "index.html").read_text()))


def test_the_page_shows_all_that_is_known_of_a_turn_and_of_a_branch() -> None:
    folder = Path(server.__file__).parent
    script, style = ((folder / name).read_text() for name in ("page.js", "page.css"))
    for kind in ("context", "sampled"):
        assert f'{{ class: "{kind}" }}, turn.{kind})' in script
        assert f"turn.{kind}_tokens" in script
        assert f".{kind} {{" in style
    for name in ("name", "reward", "share", "sampled_tokens", "turns"):
        assert f"branch.{name}" in script
    assert "other.after?.branch === place" in script


def test_a_taken_port_and_a_missing_folder_are_named(runs: Path, port: int) -> None:
    with pytest.raises(ConfigError, match=f"^port {port} of this machine is taken, .* --port"):
        open_dashboard(runs, port)
    with pytest.raises(ConfigError, match="--port must be from 0 to 65535, got 70000"):
        open_dashboard(runs, 70000)
    with pytest.raises(ConfigError, match="a folder of runs, or a run's own, got .*nowhere"):
        open_dashboard(runs / "nowhere", 0)


def test_a_trace_is_served_as_it_was_written(port: int, runs: Path) -> None:
    assert get(port, "/api/runs/one/trace") == (200, "{}")
    written = {"traceEvents": [{"ph": "X", "name": "batch", "ts": 1, "dur": 2}]}
    (runs / "one" / "trace.json").write_text(json.dumps(written))
    status, body = get(port, "/api/runs/one/trace")
    assert (status, json.loads(body)) == (200, written)
    assert [line["has_trace"] for line in RunFolders(runs).overview()] == [True]


def group(step: int, *rewards: float) -> dict:
    numbers = {"rewards": rewards, "sampled_tokens": [3] * len(rewards), "surprisal": [0.5, None]}
    return {"step": step, "environment": "e", "task_index": 4, **numbers}


def test_the_numbers_of_groups_are_served_without_those_that_are_none(port: int, runs: Path):
    assert get(port, "/api/runs/one/groups") == (200, "[]")
    lines = [group(1, 0.0, 1.0), group(2, 1.0) | {"rewards": ["<b>"]}, {"step": 3}]
    (runs / "one" / "groups.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    status, text = get(port, "/api/runs/one/groups")
    assert (status, json.loads(text)) == (200, [json.loads(json.dumps(lines[0]))])


def saved(folder: Path, out: Path) -> dict:
    """Returns the answers that the page of a run holds."""
    assert save_run(folder, out) == 0
    page = out.read_text()
    (data,) = re.findall(r'id="given">(.*)</script>', page)
    assert "<" not in data
    assert not re.search(r"\b(src|href)=|import |</script>.*</script>.*</script>", page)
    return json.loads(data)


def test_a_run_can_be_sent_as_one_page_with_what_the_server_answers(port: int, runs: Path):
    samples = [{"step": step, "reply": "</script><b>"} for step in (1, 2)]
    text = "".join(json.dumps(each) + "\n" for each in samples)
    (runs / "one" / "trajectories.jsonl").write_text(text)
    (runs / "one" / "groups.jsonl").write_text(json.dumps(group(1, 0.5)) + "\n")
    answers = saved(runs / "one", runs / "page.html")
    (overview,) = answers.pop("/api/runs")
    assert (overview["name"], overview["has_trace"]) == ("one", False)
    metrics = answers.pop("/api/runs/one/metrics?from=0")
    assert metrics["rows"] == [{"step": 0, "reward_mean": 0.5}]
    assert set(answers) == {
        f"/api/runs/one/{what}"
        for what in (
            "trajectories",
            "trajectories?step=1",
            "trajectories?step=2",
            "groups",
            "about",
        )
    }
    for path, answer in answers.items():
        assert json.loads(get(port, path)[1]) == answer
    # The script takes these answers in place of the server's.
    assert "if (sent) return sent[path];" in (runs / "page.html").read_text()


def test_a_page_of_many_steps_shows_some_of_them_and_the_newest(tmp_path: Path) -> None:
    rows = [{"step": step} for step in range(5001)]
    for step in range(0, 5001, 25):
        rows.insert(step + step // 25, {"evaluation_step": step})
    run = a_run(tmp_path, "long", *rows)
    answers = saved(run, tmp_path / "page.html")
    shown = answers["/api/runs/long/metrics?from=0"]
    steps = [row["step"] for row in shown["rows"] if "step" in row]
    assert steps == [*range(0, 4991, 6), *range(4991, 5001)]
    # Those are rare, and every sixth row may be none.
    evaluations = [row["evaluation_step"] for row in shown["rows"] if "step" not in row]
    assert evaluations == [*range(0, 5001, 25)]
    assert shown["end"] == (run / "metrics.jsonl").stat().st_size
    assert answers["/api/runs/long/trajectories"]["steps"] == []


def test_a_page_leaves_out_the_replies_of_old_steps_where_all_are_too_many(tmp_path, capsys):
    run = a_run(tmp_path, "wordy", {"step": 0})
    lines = [{"step": step, "reply": "a" * (3 << 20)} for step in range(1, 7)]
    (run / "trajectories.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    answers = saved(run, tmp_path / "page.html")
    assert answers["/api/runs/wordy/trajectories"]["steps"] == [2, 3, 4, 5, 6]
    assert "/api/runs/wordy/trajectories?step=1" not in answers
    assert "the replies of 1 older step were left out" in capsys.readouterr().out


def test_a_page_is_of_one_run_and_replaces_no_file(runs: Path) -> None:
    with pytest.raises(ConfigError, match="--out needs the folder of one run with metrics"):
        save_run(runs, runs / "page.html")
    (runs / "page.html").touch()
    with pytest.raises(ConfigError, match=r"page\.html exists already: remove it"):
        save_run(runs / "one", runs / "page.html")
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        save_run(runs / "one", runs / "absent" / "page.html")
