"""Tinker's own SDK, unmodified: its types beside the server's tables, and its calls at a server.

`make test-tinker` installs requirements/tinker.txt in a folder of its own.
"""

import asyncio
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from slipstream.extensions.tinker.contract import (
    LOSS_INPUTS,
    MESSAGES,
    REQUESTS,
    REQUIRED,
    SDK,
    UNREAD,
    UNSERVED,
    Use,
)
from slipstream.extensions.tinker.requested_passes import LOSSES, UNPUBLISHED
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.small_checkpoints import save_checkpoint
from support.rigs.loop_client import LoopClient
from support.rigs.loop_runs import loop_config, started

tinker: Any = pytest.importorskip(
    "tinker", reason="Tinker's SDK is not installed here: make test-tinker has it"
)
ADDRESS = re.compile(r'"/api/v1/([^"{]+?)/?(?:\{[^"]*)?"')
# The first parts of addresses that are answered.
SERVED = {
    "asample",
    "checkpoints",
    "client",
    "create_model",
    "create_sampling_session",
    "create_session",
    "forward",
    "forward_backward",
    "get_info",
    "get_server_capabilities",
    "healthz",
    "load_weights",
    "optim_step",
    "retrieve_future",
    "samplers",
    "save_weights",
    "save_weights_external",
    "save_weights_for_sampler",
    "session_heartbeat",
    "sessions",
    "telemetry",
    "training_runs",
    "weights_info",
}


def types_of_the_sdk() -> dict[str, type[BaseModel]]:
    """The SDK's types of JSON by their names."""
    package = importlib.import_module("tinker.types")
    prefix = f"{package.__name__}."
    types: dict[str, type[BaseModel]] = {}
    for info in pkgutil.walk_packages(package.__path__, prefix):
        module = importlib.import_module(info.name)
        kinds = (kind for kind in vars(module).values() if isinstance(kind, type))
        models = (kind for kind in kinds if issubclass(kind, BaseModel))
        types |= {model.__name__: model for model in models}
    return types


def default_of(field: Any) -> object:  # noqa: ANN401 - pydantic's
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True)
    return value.model_dump() if isinstance(value, BaseModel) else value


def test_the_tables_follow_the_installed_sdk() -> None:
    assert f"tinker {tinker.__version__}" == SDK


@pytest.mark.parametrize("name", REQUESTS)
def test_each_request_has_the_fields_and_defaults_of_the_sdk(name: str) -> None:
    sdk_type = types_of_the_sdk()[name]
    theirs: dict[str, object] = {}
    for key, sdk_field in sdk_type.model_fields.items():
        theirs[key] = default_of(sdk_field)
    ours: dict[str, object] = {}
    for key, field in REQUESTS[name].items():
        ours[key] = field.default
    if name == "OptimStepRequest":
        # The wire has two names for one field: the numbers of Adam, or of another optimizer.
        assert theirs.pop("optim_params") is REQUIRED
        assert ours.pop("adam_params") is REQUIRED
        assert ours.pop("optimizer_params") is None
    assert ours == theirs


def test_each_type_of_a_request_has_its_fields_or_its_reason() -> None:
    endings = ("Request", "Params", "Config", "Chunk", "ModelInput")
    theirs = {name for name in types_of_the_sdk() if name.endswith(endings)}
    assert not {*REQUESTS} & {*UNREAD}
    assert {*REQUESTS, *UNREAD} == theirs


@pytest.mark.parametrize("name", MESSAGES)
def test_each_message_has_the_fields_of_the_sdk(name: str) -> None:
    public = importlib.import_module("tinker.proto.tinker_public_pb2")
    theirs = {field.name for field in getattr(public, name).DESCRIPTOR.fields}
    assert {*MESSAGES[name]} == theirs


def test_losses_and_their_inputs_are_those_of_the_sdk() -> None:
    datum = importlib.import_module("tinker.types.datum")
    assert {*LOSS_INPUTS} == {*datum._KEY_TO_TYPE}
    kinds = get_args(importlib.import_module("tinker.types.loss_fn_type").LossFnType)
    assert {*LOSSES, UNPUBLISHED, "custom"} == {*kinds}


def test_each_address_of_the_sdk_is_served_or_has_its_reason() -> None:
    folder = Path(tinker.__file__).parent
    addresses: set[str] = set()
    for path in folder.rglob("*.py"):
        addresses |= {*ADDRESS.findall(path.read_text())}
    assert len(addresses) > 25
    for address in addresses:
        first_part = address.partition("/")[0]
        reasons = [part for part in UNSERVED if address.startswith(part)]
        assert first_part in SERVED or reasons, address


def test_no_field_of_use_is_dropped() -> None:
    uses: set[Use] = set()
    for fields in (*REQUESTS.values(), *MESSAGES.values()):
        uses |= {field.use for field in fields.values()}
    assert uses == {*Use}


def address_of(client: LoopClient) -> str:
    return f"http://127.0.0.1:{client.http.base_url.port}"


def service_of(client: LoopClient) -> Any:  # noqa: ANN401 - the SDK's
    return tinker.ServiceClient(base_url=address_of(client), api_key="tml-any")


def rest_of(client: LoopClient, key: str = "tml-any") -> Any:  # noqa: ANN401 - the SDK's
    return tinker.RestClient(base_url=address_of(client), api_key=key)


def datum_of(**inputs: list[float]) -> Any:  # noqa: ANN401 - the SDK's
    values: dict[str, list[float]] = {"target_tokens": [2, 3, 4]}
    values |= inputs
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs=values,
    )


def ten_lines(client: LoopClient, folder: str) -> list[int]:
    """The program of the guide; returns the tokens that it samples."""
    service = service_of(client)
    model = service.create_lora_training_client(base_model=folder).result()
    datum = datum_of(weights=[1.0] * 3)
    future = model.forward_backward([datum], loss_fn="cross_entropy")
    adam = tinker.types.AdamParams(learning_rate=0.01)
    model.optim_step(adam).result()
    metrics = future.result().metrics
    assert metrics["loss:sum"] == 1.0
    sampler = model.save_weights_and_get_sampling_client().result()
    reply = sampler.sample(
        prompt=tinker.types.ModelInput.from_ints([1, 2]),
        num_samples=1,
        sampling_params=tinker.types.SamplingParams(max_tokens=4, temperature=0.0),
    )
    return reply.result().sequences[0].tokens


async def test_the_programme_of_the_guide_runs_twice(tmp_path: Path) -> None:
    config = loop_config(tmp_path)
    async with started(config) as (client, _, trainer):
        folder = str(config.model.path)
        for _ in range(2):
            tokens = await asyncio.to_thread(ten_lines, client, folder)
            assert tokens
        kinds = [order.WhichOneof("step") for order, _ in trainer.ordered]
        assert kinds == ["adam", "begin", "adam"]


def losses_and_states(
    client: LoopClient, folder: str, trainer: FakeTrainer, run_dir: Path
) -> None:
    """What the SDK's calls say of losses, states and names."""
    service = service_of(client)
    model = service.create_lora_training_client(base_model=folder).result()
    inputs = {"advantages": [0.0, 1.0, 1.0], "logprobs": [-1.0] * 3}
    datum = datum_of(**inputs)
    masked = datum_of(**inputs, sequence_ratio_mask=[0.0, 1.0, 1.0])
    data = {"importance_sampling": datum, "ppo": datum, "cispo": datum, "dro": datum}
    data["gspo"] = masked
    for loss, of_loss in data.items():
        result = model.forward_backward([of_loss], loss_fn=loss).result()
        logprobs = result.loss_fn_outputs[0]["logprobs"]
        assert logprobs.tolist() == [-1.5] * 3
    refused = model.forward_backward([datum], loss_fn="stable_reinforce")
    with pytest.raises(tinker.RequestFailedError, match="its formula is not published"):
        refused.result()
    fallback = {"fallback": "ppo", "clip_high_threshold": 1.3}
    model.forward_backward([datum], "stable_reinforce", fallback).result()
    too_wide = {"clip_high_threshold": 1e308}
    refused = model.forward_backward([datum], "ppo", too_wide)
    with pytest.raises(tinker.RequestFailedError, match="is a number from 1 to 1e"):
        refused.result()
    model.optim_step(tinker.types.AdamParams()).result()
    metadata = {"note": "first"}
    path = model.save_state("one", user_metadata=metadata).result().path
    save_checkpoint(run_dir / "checkpoints", trainer.version.step)
    refused = model.save_state("one")
    with pytest.raises(
        tinker.RequestFailedError, match="is in use: give the state another name"
    ):
        refused.result()
    replaced = model.save_state("one", overwrite=True).result()
    assert replaced.path == path
    model.load_state_with_optimizer(path).result()
    rest = rest_of(client)
    listed = rest.list_user_checkpoints().result()
    (checkpoint,) = listed.checkpoints
    assert checkpoint.tinker_path == path
    assert checkpoint.user_metadata is None
    tokenizer = Path(model.get_info().model_data.tokenizer_id)
    assert tokenizer.is_absolute()
    # A client with another key sees nothing of it.
    other = rest_of(client, "tml-other")
    listed = other.list_user_checkpoints().result()
    assert listed.checkpoints == []
    deletion = other.delete_checkpoint_from_tinker_path(path)
    with pytest.raises(tinker.PermissionDeniedError, match="is of another api_key"):
        deletion.result()


async def test_losses_states_and_keys_are_as_the_sdk_says(tmp_path: Path) -> None:
    config = loop_config(tmp_path)
    async with started(config) as (client, _, trainer):
        folder = str(config.model.path)
        await asyncio.to_thread(
            losses_and_states, client, folder, trainer, config.run_dir
        )
