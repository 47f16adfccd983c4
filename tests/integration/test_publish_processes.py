"""The trainer's program sends to processes over gloo, from one rank and two stages, and by ipc."""

from pathlib import Path

import pytest
from support.fakes.tiny_models import make_model_folder
from support.ranks.rank_pool import RankPool
from support.rigs import publish_scenario
from support.rigs.publish_scenario import Scenario

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    return make_model_folder(
        tmp_path_factory.mktemp("model"), **sizes, num_key_value_heads=2, tie_word_embeddings=True
    )


@pytest.mark.parametrize(
    ("transport", "pp"), [("gloo", 2), ("ipc", 1), pytest.param("gloo", 1, marks=pytest.mark.slow)]
)
def test_every_publish_arrives_but_the_one_in_which_a_receiver_is_killed(
    transport: str, pp: int, tmp_path: Path, model: Path, rank_pool: RankPool
) -> None:
    learner = {"world_size": pp, "parallel": {"pp": pp}}
    scenario = Scenario(tmp_path, model, transport, 2, learner=learner)
    found = publish_scenario.run(scenario, pool=rank_pool)
    publish_scenario.check(found, num_senders=pp, num_receivers=2)
    sizes = {result.bytes_sent for result in found.results if not result.error}
    assert len(sizes) == 1
