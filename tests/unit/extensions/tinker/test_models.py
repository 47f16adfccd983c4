"""The places of clients' models."""

import pytest
from slipstream.core.settings.role_sections import LoraSection
from slipstream.extensions.tinker import models
from slipstream.extensions.tinker.models import Entry, Models, Named
from slipstream.extensions.tinker.owners import new_session, owner_of_key
from slipstream.v1.operations_pb2 import Operation
from slipstream.v1.trainer_pb2 import Adapter

TWO = LoraSection(rank=8, publish="adapters", adapters=("a", "b"))
NEW = Adapter(rank=2, alpha=4.0)


def test_without_adapters_the_newest_stream_takes_the_model_over() -> None:
    all_models = Models(LoraSection())
    first = all_models.take("s:train:0", NEW)
    assert all_models.refusal("u:train:0") == ""
    second = all_models.take("s:train:1", NEW)
    assert [all_models.is_there(model) for model in (first, second)] == [False, True]
    assert second.adapter.name == ""


def test_a_new_model_gets_a_free_place_and_is_refused_where_there_is_none() -> None:
    all_models = Models(TWO)
    adapters = [
        all_models.take(stream, NEW).adapter for stream in ("s:train:0", "t:train:0")
    ]
    assert [(adapter.name, adapter.rank, adapter.alpha) for adapter in adapters] == [
        ("a", 2, 4.0),
        ("b", 2, 4.0),
    ]
    assert "all 2 places for models (lora.adapters) are taken" in all_models.refusal(
        "u:train:0"
    )
    all_models.finished["t"] = Entry(Operation(id="t:finish", stream="t"))
    assert all_models.refusal("u:train:0") == ""
    assert all_models.take("u:train:0", NEW).adapter.name == "b"
    assert "t:train:0" not in all_models.by_stream


def test_the_only_model_goes_to_its_owner_and_to_others_when_it_is_not_used() -> None:
    all_models = Models(LoraSection())
    owner = new_session(owner_of_key(b"tml-own", "r"))
    other = new_session(owner_of_key(b"tml-other", "r"))
    model = all_models.take(f"{owner}:train:0", NEW)
    assert all_models.refusal(f"{owner}:train:1") == ""
    refusal = all_models.refusal(f"{other}:train:0")
    assert "the run's only model is that of another api_key" in refusal
    assert all_models.newest("tinker://newest", f"{owner}:train:1") is model
    for name in ("tinker://newest", f"tinker://{owner}:train:0/newest"):
        assert all_models.newest(name, f"{other}:train:0") is None
    all_models.finished[owner] = Entry(Operation(id=f"{owner}:finish", stream=owner))
    assert all_models.refusal(f"{other}:train:0") == ""


def test_a_silent_model_gives_its_place_up(monkeypatch: pytest.MonkeyPatch) -> None:
    all_models = Models(TWO)
    silent, trained = (
        all_models.take(stream, NEW) for stream in ("s:train:0", "t:train:0")
    )
    later_s = silent.used_s + models.IDLE_S + 1
    monkeypatch.setattr(models.time, "monotonic", lambda: later_s)
    trained.touch()
    assert all_models.take("u:train:0", NEW).adapter.name == "a"
    assert (all_models.is_there(silent), all_models.is_there(trained)) == (False, True)


def test_names_go_with_what_they_name() -> None:
    all_models = Models(TWO)
    model, gone = (
        all_models.take(stream, NEW) for stream in ("s:train:0", "t:train:0")
    )
    all_models.take("u:train:0", Adapter(name="b"))
    for version in (1, 2):
        model.publish(version)
        gone.publish(version)
    names = {
        "newest": (2, model),
        "older": (1, model),
        "gone": (2, gone),
        "saved": (3, gone),
    }
    all_models.named = {name: Named(*of) for name, of in names.items()}
    all_models.named["flying"] = Named(1, model, in_flight=True)
    all_models.lasting((3,))
    assert list(all_models.named) == ["newest", "saved", "flying"]


def test_the_end_of_a_session_is_kept_as_long_as_its_model_has_its_place() -> None:
    all_models = Models(TWO)
    finish = Entry(Operation(id="t:finish", stream="t"))
    all_models.take("t:train:0", NEW)
    all_models.finished["t"] = finish
    assert finish in all_models.lasting(())
    # A model takes its place after a restart, too.
    assert all_models.take("u:train:0", Adapter(name="a")).adapter.name == "a"
    assert "t:train:0" not in all_models.by_stream
    assert finish not in all_models.lasting(())
