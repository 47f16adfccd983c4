"""Several teachers: what a run is told of them before it starts, and what they take."""

from pathlib import Path

from slipstream.client.launch import fit
from slipstream.client.launch.scene import Scene
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.extensions.other_models import launch
from support.fakes.small_configs import small_config
from support.fakes.tiny_models import make_model_folder

KL = {"kl": {"coefficient": 0.1}}


def test_an_environment_that_nobody_listed_is_told_and_a_listed_one_is_not() -> None:
    environments = [{"reference": "m:E", "name": "sums"}]
    teachers = {"t": {"environments": ["sums"], "policy": True}}
    config = small_config(
        algorithm=KL, environments=environments, reference={"teachers": teachers}
    )
    assert launch.check_names(Scene(config)) is None
    teachers["t"]["environments"] = ["sums", "sum"]
    config = small_config(
        algorithm=KL, environments=environments, reference={"teachers": teachers}
    )
    finding = launch.check_names(Scene(config))
    assert finding is not None
    assert finding.seen == (
        "reference.teachers.t.environments: the run's [[environments]] have no sum"
    )


def test_each_model_on_the_ranks_takes_its_weights(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model")
    path = str(model)
    parameters = read_model_sizes(model).parameters
    tables = {
        "model": {"path": path, "dtype": "bfloat16"},
        "learner": {"world_size": 2},
    }
    plain = fit.needs_of(small_config(**tables))
    teachers = {
        "a": {"environments": ["sums"], "path": path},
        "b": {"environments": ["x"], "path": path, "parallel": {"tp": 2}},
        "c": {"environments": ["y"], "policy": True},
    }
    taught = fit.needs_of(
        small_config(algorithm=KL, reference={"teachers": teachers}, **tables)
    )
    assert plain is not None
    assert taught is not None
    assert taught.bytes_by_role == {
        "reference": 2 * parameters,
        "reference.teachers.a": 2 * parameters,
        "reference.teachers.b": parameters,
    }
    assert taught.rank_bytes - plain.rank_bytes == 5 * parameters
