"""What the sending ranks put into buckets is what Bridge exports, bit for bit, in every layout."""

from pathlib import Path

import pytest
import torch
from support.ranks import stream_ranks
from support.ranks.parity_layouts import LAYOUTS
from support.ranks.rank_pool import RankPool, chosen_jobs, each_job

# Layout -> ranks that send.
SENDERS = {
    "one": [0],
    "one-tied": [0],
    "one-moe": [0],
    "tp2": [0],
    "tp2-odd": [0],
    "dp2-overlap": [0],
    "pp2-tied": [0, 1],
    "cp2": [0],
    "ep2-moe": [0, 1],
    "etp2-moe": [0],
    "tp2-sp-etp1-ep2-moe": [0, 1],
    "dp2-pp2-tied": [0, 2],
    "pp2-vpp2-ep2-moe": [0, 1, 2, 3],
}
QUICK = ("one", "one-tied", "one-moe", "tp2-odd", "pp2-tied", "ep2-moe")
for_layouts = pytest.mark.parametrize(
    "job", each_job(SENDERS, (), SENDERS.keys() - QUICK)
)


@pytest.fixture(scope="module")
def found(
    folder: Path, rank_pool: RankPool, request: pytest.FixtureRequest
) -> dict[str, list[dict]]:
    models = ["one", "one-tied", "one-moe", *chosen_jobs(request, SENDERS)]
    sizes = {name: LAYOUTS[name].world_size for name in models}
    return rank_pool.found(stream_ranks, sizes, folder, "{}-stream-{}.pt")


@for_layouts
def test_buckets_of_all_senders_are_the_export(
    job: str, found: dict[str, list[dict]]
) -> None:
    ranks = found[job]
    assert all(rank["senders"] == SENDERS[job] for rank in ranks)
    assert ranks[0]["num_buckets"] > 10
    for number in range(3):
        passes = [rank["passes"][number] for rank in ranks]
        sent = [(name, t) for p in passes for name, t in p["tensors"].items()]
        tensors = dict(sent)
        assert len(tensors) == len(sent)
        assert set(tensors) == set(passes[0]["exported"])
        for name, tensor in passes[0]["exported"].items():
            assert tensor.shape == tensors[name].shape, name
            assert torch.equal(tensor, tensors[name]), name
        assert all(
            bool(p["tensors"]) == (r in SENDERS[job]) for r, p in enumerate(passes)
        )
    assert len({rank_pass["identity"] for rank_pass in ranks[0]["passes"]}) == 3


@for_layouts
def test_identity_depends_on_the_weights_alone(
    job: str, found: dict[str, list[dict]]
) -> None:
    alone = (
        next(
            name
            for name in ("one", "one-tied", "one-moe")
            if LAYOUTS[name].model == LAYOUTS[job].model
        )
        if LAYOUTS[job].model in ("llama", "tied", "moe")
        else job
    )
    assert {rank["passes"][0]["identity"] for rank in found[job]} == {
        found[alone][0]["passes"][0]["identity"]
    }


def test_plan_that_is_wrong_or_unknown_on_one_rank_gives_way_to_bridge_on_all(
    folder, rank_pool
):
    job = stream_ranks.WRONG_PLAN
    result = rank_pool.found(stream_ranks, {job: 2}, folder, "stream-{}-{}.pt")[job]
    assert (
        result
        == [{"kinds": ["BridgeFilling", "BridgeFilling"], "num_identities": 1}] * 2
    )
    log = (folder / "world-2-rank-0.log").read_text()
    assert (
        "the plan's model.layers.1.self_attn.k_proj.weight differs from Bridge's export"
        in log
    )
    assert "tensor by tensor: a parameter has a mapping of tomorrow" in log
