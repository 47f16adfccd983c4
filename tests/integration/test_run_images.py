"""A whole run learns what only images tell; its journal and its exported model are complete."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
from make_tiny_vision_model import FAMILIES
from slipstream.core.machine.address import free_port
from slipstream.core.models.images import image_tokens
from support.fakes.tiny_models import make_seeing_model
from support.rigs.run_processes import SLOW_RUN, check_replay, checked, rows_of, succeed

pytestmark = [*SLOW_RUN, pytest.mark.timeout(1500)]
COLOURS = Path(__file__).parents[2] / "deploy/configs/colours.toml"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_colour_of_a_square_is_learned(family: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_seeing_model(model, family)
    table = tomllib.loads(COLOURS.read_text())
    table["run"] |= {"name": "run", "dir": str(tmp_path)}
    # vLLM's delta nets on a CPU know no other type.
    is_rounded = family.startswith("qwen3_5")
    table["model"] = {
        "path": str(model),
        "dtype": "bfloat16" if is_rounded else "float32",
    }
    replays = family.endswith("_moe")
    table["algorithm"]["router_replay"] = "rollout" if replays else "off"
    table["controller"] = {"address": f"127.0.0.1:{free_port('127.0.0.1')}"}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(table))
    succeed("run", tmp_path / "config.toml", limit_s=900)
    summary = checked(tmp_path / "run")
    # A single colour alone, whatever the image shows, has a reward of 0.25.
    assert summary["reward_first"] <= 0.35
    assert summary["reward_last"] >= 0.8
    rows = rows_of(tmp_path / "run")
    if replays:
        # Later a reply may cross a publish: tokens before it keep the experts of the older version.
        assert rows[0]["logprob_gap_tokens"] > 0
        assert rows[0]["logprob_gap_max"] <= (0.1 if is_rounded else 1e-4)
        assert rows[0]["routing_difference"] <= (0.05 if is_rounded else 0)
        assert max(row["routing_unrecorded"] for row in rows if "loss" in row) == 0
    else:
        assert summary["logprob_gap_mean"] <= (0.02 if is_rounded else 1e-4)
    assert summary["probe_gap_max"] <= (0.1 if is_rounded else 1e-3)
    check_replay(tmp_path / "run", limit_s=500)
    (exported,) = (
        path.parent for path in (tmp_path / "run").rglob("model.safetensors")
    )
    assert image_tokens(exported) is not None
