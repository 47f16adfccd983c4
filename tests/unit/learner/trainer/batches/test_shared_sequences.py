"""The loss of sequences whose tokens lie on two ranks; this file is the ranks' program, too."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from slipstream.learner.algorithms.losses import step_columns
from slipstream.learner.trainer.algorithms.loss import policy_loss
from support.fakes.packed import algorithm, micro_batch
from torch import Tensor

pytestmark = pytest.mark.process

NUMBER = 24
SETTINGS = {
    "gspo": {"loss": "gspo", "loss_args": {"clip_low": 0.05, "clip_high": 0.05}},
    "sequence weight": {"weight": "sequence", "weight_args": {"cap": 1.5}},
    "geometric mask": {"weight_args": {"sequence_band": [0.9, 1.2]}},
}


def loss_of(name: str, places: Tensor, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Loss, gradient and sums of the tokens at `places` of three sequences."""
    generator = torch.Generator().manual_seed(7)
    policy, behavior, old = (torch.randn(NUMBER, generator=generator) * 0.3 - 2 for _ in range(3))
    ids = torch.arange(NUMBER) // 8
    mask = torch.rand(NUMBER, generator=generator) < 0.7
    advantages = torch.randn(3, generator=generator)[ids]
    mine = policy[places].requires_grad_()
    batch = micro_batch(
        behavior[places].tolist(),
        advantages[places].tolist(),
        mask[places].tolist(),
        sequence_ids=ids[places].tolist(),
    )
    settings = algorithm(**SETTINGS[name])
    columns = step_columns(settings, has_reference=False)
    zeros = torch.zeros(len(places))
    found = policy_loss(mine, zeros, old[places], batch, settings, columns, group=group)
    found.loss.backward()
    assert mine.grad is not None
    gradient = torch.zeros(NUMBER)
    gradient[places] = mine.grad
    return {"loss": found.loss.detach(), "gradient": gradient, "sums": found.statistics.sums}


def run_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    # Every other pair of tokens, so that each sequence lies on both.
    places = torch.arange(NUMBER).reshape(-1, 2)[rank::2].flatten()
    found = {name: loss_of(name, places, dist.group.WORLD) for name in SETTINGS}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("shared")
    search = f"import sys; sys.path[:0] = {sys.path!r}\n"
    program = search + f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), str(folder)])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_sequences_shared_by_two_ranks_have_the_loss_of_whole_ones(name, shared):
    whole = loss_of(name, torch.arange(NUMBER), None)
    alone = [
        loss_of(name, torch.arange(NUMBER).reshape(-1, 2)[r::2].flatten(), None) for r in (0, 1)
    ]
    for key, value in whole.items():
        torch.testing.assert_close(shared[0][name][key] + shared[1][name][key], value)
    # The loss would differ without the sum over the ranks.
    assert not torch.isclose(alone[0]["loss"] + alone[1]["loss"], whole["loss"])


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
