import dataclasses
from dataclasses import replace

import pytest
from slipstream.core.kept_tokens import MAX_KEPT_TOKENS
from slipstream.core.settings.sections import SamplingSection
from slipstream.rollout_server.agents.request_rules import rule
from slipstream.rollout_server.engine_interface import Sampling
from slipstream.v1 import fleet_pb2


def test_every_setting_of_the_sampling_reaches_the_engine_under_its_name() -> None:
    section = SamplingSection(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        max_reply_tokens=8,
        max_turns=3,
        max_episode_tokens=32,
        max_total_tokens=64,
        max_branches=5,
        max_prompt_tokens=9,
        stop_token_ids=(1, 2),
        stop=("a", "b"),
    )
    message = section.to_pb()
    sampling = Sampling.from_pb(message)
    names = {field.name for field in dataclasses.fields(Sampling)}
    assert names == set(fleet_pb2.SamplingSettings.DESCRIPTOR.fields_by_name)
    # The adapter is the environment's; initial model, a prompt's scores and seed a client's wish.
    other_fields = {"adapter", "ignore_eos", "by_start", "prompt_logprobs", "seed"}
    assert names - other_fields == set(SamplingSection.model_fields)
    assert sampling.seed is None
    message.adapter = "math"
    message.seed = 0
    assert (Sampling.from_pb(message).adapter, Sampling.from_pb(message).seed) == (
        "math",
        0,
    )
    for name in names - other_fields:
        assert getattr(sampling, name) == getattr(section, name), name


def test_each_setting_of_what_is_drawn_is_the_learners_too_or_known_to_cut() -> None:
    uncut = SamplingSection(max_reply_tokens=8, max_episode_tokens=32)
    assert not uncut.cuts
    for name, value in {"top_p": 0.5, "top_k": 3, "min_p": 0.1}.items():
        section = SamplingSection(
            max_reply_tokens=8, max_episode_tokens=32, **{name: value}
        )
        assert section.cuts == {f"sampling.{name}": (value, getattr(uncut, name))}
        assert Sampling.from_pb(section.to_pb()).cuts
    assert not Sampling.from_pb(uncut.to_pb()).cuts
    # The learner divides its logits by the temperature.
    drawn = Sampling.from_pb(uncut.to_pb()).distribution.keys()
    assert drawn == {"temperature", "top_p", "top_k", "min_p"}


@pytest.mark.parametrize(
    ("settings", "vocabulary", "is_recorded"),
    [
        ({"top_k": 20, "top_p": 0.95}, 150_000, True),
        ({"top_k": MAX_KEPT_TOKENS}, 150_000, True),
        # An evaluation may have such settings beside a run whose sets are recorded.
        ({"top_k": MAX_KEPT_TOKENS + 1}, 150_000, False),
        ({"top_p": 0.95}, 150_000, False),
        ({"top_p": 0.95}, MAX_KEPT_TOKENS, True),
        ({}, MAX_KEPT_TOKENS, False),
    ],
)
def test_kept_tokens_are_recorded_where_all_sets_fit(
    settings, vocabulary, is_recorded
) -> None:
    section = SamplingSection(max_reply_tokens=8, max_episode_tokens=32, **settings)
    sampling = Sampling.from_pb(section.to_pb())
    assert sampling.fits_a_record(vocabulary) == is_recorded


@pytest.mark.process
def test_settings_of_what_is_drawn_reach_vllm_and_the_rule_for_agents_from_one_place() -> (
    None
):
    pytest.importorskip("vllm")
    from slipstream.rollout_server.vllm.vllm_requests import parameters

    section = SamplingSection(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        max_reply_tokens=8,
        max_episode_tokens=32,
    )
    sampling = Sampling.from_pb(section.to_pb())
    vllm_parameters = parameters(sampling, 8, experts_from=0)
    assert (
        vllm_parameters.seed,
        parameters(replace(sampling, seed=0), 8, experts_from=0).seed,
    ) == (None, 0)
    wishes = {"temperature": 1, "top_p": 1, "top_k": 1, "min_p": 1}
    _, messages = rule(wishes, sampling, fields=(), variables=())
    for name in wishes:
        assert sampling.distribution[name] == getattr(section, name)
        assert getattr(vllm_parameters, name) == getattr(section, name)
        assert messages[name] == f"{getattr(section, name):g} (asked 1)"


def test_settings_that_are_left_out_are_no_limit() -> None:
    section = SamplingSection(max_reply_tokens=8, max_episode_tokens=32)
    sampling = Sampling.from_pb(section.to_pb())
    assert (sampling.max_prompt_tokens, sampling.top_k, sampling.stop) == (0, 0, ())
    assert sampling.total_tokens == section.total_tokens == 32
