"""The audit on planted faults of data, judges and environments, and on sound ones."""

import json
from pathlib import Path

import pytest
from slipstream.client.audit import Audit
from slipstream.client.audit_report import Finding, findings
from slipstream.client.episode_host import EpisodeHost
from slipstream.v1 import environment_pb2 as pb

pytestmark = pytest.mark.process
DATA = Path(__file__).parents[2] / "data" / "audit"


def cases(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


async def audited(case: dict, folder: Path, *, limit_s: float = 600.0) -> list[Finding]:
    args = case["args"]
    if case["rows"] is not None:
        path = folder / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in case["rows"]))
        args = args | {"path": str(path)}
    host = EpisodeHost()
    spec = {"reference": case["class"], "args_json": json.dumps(args), "search_path": str(DATA)}
    loading = await host.answer(pb.WorkerCommand(load={"spec": spec}))
    if loading.HasField("failure"):
        return [Finding(loading.failure.message, is_refused=True)]

    async def ask(**command: object) -> pb.WorkerMessage:
        return await host.answer(pb.WorkerCommand(**command))

    audit = Audit(host, ask, loaded=loading.loaded, limit_s=limit_s)
    return findings(await audit.run(lambda *_: None))


@pytest.mark.parametrize("case", cases("faults.jsonl"), ids=lambda case: case["name"])
async def test_a_planted_fault_is_found(case: dict, tmp_path: Path) -> None:
    found = await audited(case, tmp_path)
    said = [each for each in found if case["says"] in each.text]
    assert [each.is_refused for each in said][:1] == [case["refused"]], found


@pytest.mark.parametrize("case", cases("sound.jsonl"), ids=lambda case: case["name"])
async def test_what_is_sound_is_neither_refused_nor_told(case: dict, tmp_path: Path) -> None:
    found = await audited(case, tmp_path)
    assert not [each for each in found if each.is_refused or not case.get("may_tell")]


async def test_what_had_no_time_is_told(tmp_path: Path) -> None:
    case = next(case for case in cases("sound.jsonl") if len(case["rows"] or ()) > 1)
    assert not [each for each in await audited(case, tmp_path) if "had no time" in each.text]
    found = await audited(case, tmp_path, limit_s=0.0)
    assert [each.is_refused for each in found if "had no time" in each.text] == [False]
