"""The wire of the Tinker API, with what SDK 0.38 sends and what it reads, byte for byte."""

import json
import math

import numpy as np
import pytest
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import Config
from slipstream.extensions.tinker import operations, requested_passes
from slipstream.extensions.tinker import wire_pb2 as wire
from slipstream.extensions.tinker.request_fields import Refused
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import trainer_pb2

# forward_backward of the tokens 1, 2, 3 with ppo, thresholds 0.9 and 1.3, as the SDK encodes it.
SENT = bytes.fromhex(
    "0a0a73313a747261696e3a3010031a88010a100a0e0a0c01000000020000000300000012210a0a616476616e74616765"
    "7312130a0c000000000000003f0000803f1801220103121f0a086c6f6770726f627312130a0c000080bf000000c00000"
    "40c0180122010312300a0d7461726765745f746f6b656e73121f0a180200000000000000030000000000000004000000"
    "000000001802220103220370706f2a1e0a13636c69705f686967685f7468726573686f6c6411cdccccccccccf43f2a1d"
    "0a12636c69705f6c6f775f7468726573686f6c6411cdccccccccccec3f3a200a13636c69705f686967685f7468726573"
    "686f6c64120909cdccccccccccf43f3a1f0a12636c69705f6c6f775f7468726573686f6c64120909cdccccccccccec3f"
)
# A result that the SDK reads as two replies, and as the log-probabilities of two data.
READ_REPLIES = (
    "0a14120804000000090000001a08000000bf000080be0a0e08011204070000001a04000080bf"
)
READ_PASS = (
    "0a0a54656e736f7244617461123a12360a086c6f6770726f6273122a0a0c000080bf000000c0000040c0121800000000"
    "0000000008000000000000000c00000000000000180118021a130a086c6f73733a73756d11000000000000f83f"
)
OPTIM_STEP = json.loads(
    '{"model_id":"s1:train:0","seq_id":4,"type":"optim_step","adam_params":{"learning_rate":0.001,'
    '"beta1":0.9,"beta2":0.95,"eps":1e-12,"weight_decay":0.0,"grad_clip_norm":2.0}}'
)
SAMPLE = json.loads(
    '{"num_samples":2,"prompt":{"chunks":[{"tokens":[5,6],"type":"encoded_text"}]},'
    '"sampling_params":{"max_tokens":4,"stop":["x"],"temperature":1.0,"top_k":-1,"top_p":1.0},'
    '"sampling_session_id":"s1:sample:0","seq_id":7,"prompt_logprobs":false,'
    '"topk_prompt_logprobs":0,"topk_sample_logprobs":0,"prompt_alt_tokens_k":0,"type":"sample"}'
)
CREATE = json.loads(
    '{"session_id":"s1","model_seq_id":0,"base_model":"tiny","lora_config":{"rank":8,'
    '"train_unembed":true,"train_mlp":true,"train_attn":true},'
    '"optimizer_config":{"type":"adamw"},"type":"create_model"}'
)


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def ids(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def config_of(**tables: dict) -> Config:
    table = {
        "run": {"name": "own", "steps": 10},
        "model": {"path": "models/tiny", "dtype": "float32"},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 16},
        "controller": {"client_loop": True},
        "learner": {"shared_prefix_tokens": 0},
    }
    return parse_config(table | tables, source="test")


def test_forward_backward_is_a_pass_with_the_sdks_number_as_its_identity() -> None:
    request = wire.ForwardBackwardRequest.FromString(SENT)
    operation = requested_passes.forward_backward(request)
    assert (operation.stream, operation.number) == ("s1:train:0", 3)
    assert operation.id == operation.compute.id == "s1:train:0:3:forward_backward"
    assert operation.compute.backward
    assert operation.compute.loss == "ppo"
    arguments = json.loads(operation.compute.loss_args_json)
    assert arguments.pop("ratio") == "behavior"
    assert arguments == pytest.approx({"clip_low": 0.1, "clip_high": 0.3})
    (sequence,) = operation.compute.sequences
    assert sequence == trainer_pb2.PassSequence(
        token_ids=ids(1, 2, 3),
        targets=ids(2, 3, 4),
        advantages=floats(0, 0.5, 1),
        behavior_logprobs=floats(-1, -2, -3),
    )
    # Forward alone leaves no gradient.
    request.forward_only = True
    assert not requested_passes.forward_backward(request).compute.backward


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [("ppo", 0.8, 1.2), ("cispo", 0.0, 4.0), ("gspo", 0.8, 1.2)],
)
def test_ratios_without_thresholds_are_clipped_as_tinkers_pages_say(
    loss, low, high
) -> None:
    request = wire.ForwardBackwardRequest.FromString(SENT)
    request.loss_fn = loss
    request.ClearField("loss_fn_config")
    request.ClearField("loss_fn_config_v2")
    arguments = json.loads(
        requested_passes.forward_backward(request).compute.loss_args_json
    )
    assert arguments["clip_low"] == pytest.approx(1.0 - low)
    assert arguments["clip_high"] == pytest.approx(high - 1.0)


def test_gspo_takes_the_tokens_of_its_ratio() -> None:
    request = wire.ForwardBackwardRequest.FromString(SENT)
    request.loss_fn = "gspo"
    inputs = request.data[0].loss_fn_inputs
    inputs["sequence_ratio_mask"].CopyFrom(inputs["advantages"])
    inputs["sequence_ratio_mask"].dense = floats(0, 1, 1)
    (sequence,) = requested_passes.forward_backward(request).compute.sequences
    assert sequence.ratio_mask == b"\x00\x01\x01"


def test_an_unpublished_loss_is_computed_as_its_client_says(caplog) -> None:
    request = wire.ForwardBackwardRequest.FromString(SENT)
    request.loss_fn = "stable_reinforce"
    request.loss_fn_config_v2["fallback"].text = "ppo"
    request.data[0].loss_fn_input_spans.append(b"")
    assert requested_passes.forward_backward(request).compute.loss == "ppo"
    assert "loss_fn stable_reinforce is computed as ppo" in caplog.text
    request.loss_fn_config_v2["fallback"].text = "other"
    with pytest.raises(Refused, match="its formula is not published"):
        requested_passes.forward_backward(request)


def test_the_digest_of_an_operation_is_of_its_content() -> None:
    save = {"model_id": "s1:train:0", "seq_id": 5, "path": "x", "ttl_seconds": 60}
    digests = {
        operations.content_digest(operations.save("save_weights", save | change))
        for change in ({}, {}, {"path": "y"}, {"overwrite": True})
    }
    assert len(digests) == 3


def test_optim_step_has_its_own_numbers_of_adam() -> None:
    operation = operations.optim_step(OPTIM_STEP)
    assert (operation.id, operation.number) == ("s1:train:0:4:optim_step", 4)
    assert operation.step == trainer_pb2.AdamNumbers(
        learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-12, max_grad_norm=2.0
    )


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"beta1": 1.0}, "beta1 must be below 1, got 1.0"),
        (
            {"learning_rate": True},
            "learning_rate is a number from 0 to 1e\\+06, got True",
        ),
        (
            {"learning_rate": "1e-3"},
            "learning_rate is a number from 0 to 1e\\+06, got '1e-3'",
        ),
        (
            {"learning_rate": None},
            "learning_rate is a number from 0 to 1e\\+06, got None",
        ),
        (
            {"weight_decay": 1e30},
            "weight_decay is a number from 0 to 1e\\+06, got 1e\\+30",
        ),
        (
            {"amsgrad": True},
            "AdamParams has no field amsgrad: this server speaks the wire of",
        ),
        ({"beta2": 1.0}, "beta2 must be below 1, got 1.0"),
        ({"eps": 0.0}, "eps must be above 0 in float32, got 0.0"),
        ({"eps": 1e-60}, "eps must be above 0 in float32, got 1e-60"),
    ],
)
def test_numbers_that_adam_cannot_use_are_refused(change: dict, cause: str) -> None:
    with pytest.raises(Refused, match=cause):
        operations.optim_step(
            OPTIM_STEP | {"adam_params": OPTIM_STEP["adam_params"] | change}
        )


def test_a_sample_asks_for_the_version_of_its_session() -> None:
    operation = operations.sample(SAMPLE, config_of(), 7)
    assert operation.id == "s1:sample:0:7:sample"
    sample = operation.sample
    assert (sample.name, sample.num_samples) == ("s1:sample:0", 2)
    assert sample.prompt_token_ids == ids(5, 6)
    settings = sample.sampling
    assert (settings.max_reply_tokens, settings.temperature, settings.top_p) == (
        4,
        1.0,
        1.0,
    )
    assert (settings.top_k, list(settings.stop), settings.ignore_eos) == (
        0,
        ["x"],
        False,
    )
    assert not (settings.prompt_logprobs or settings.HasField("seed"))
    seeded = operations.sample(
        SAMPLE | {"sampling_params": {"seed": 0}}, config_of(), 7
    )
    assert seeded.sample.sampling.HasField("seed")
    scored = operations.sample(SAMPLE | {"prompt_logprobs": True}, config_of(), 7)
    assert scored.sample.sampling.prompt_logprobs


@pytest.mark.parametrize(
    ("stop", "texts", "tokens", "ignores"),
    [
        (None, [], [], False),
        ("a", ["a"], [], False),
        ([3], [], [3], False),
        ([], [], [], True),
    ],
)
def test_replies_stop_as_the_sdk_says(stop, texts, tokens, ignores) -> None:
    request = SAMPLE | {"sampling_params": {"stop": stop}}
    settings = operations.sample(request, config_of(), 7).sample.sampling
    assert (list(settings.stop), list(settings.stop_token_ids)) == (texts, tokens)
    assert (settings.ignore_eos, settings.max_reply_tokens) == (ignores, 8)


def test_a_sampling_session_names_its_weights() -> None:
    request = {"session_id": "s1", "sampling_session_seq_id": 3}
    path = "tinker://s1:train:0/sampler_weights/best"
    for start, name in (({"model_path": path}, path), ({"base_model": "tiny"}, "")):
        session = operations.sampling_session(request | start, config_of())
        asked_by = SAMPLE | {"sampling_session_id": session}
        sample = operations.sample(asked_by, config_of(), 0).sample
        assert sample.name == name


def test_saves_and_loads_are_named_by_their_paths() -> None:
    request = {"model_id": "s1:train:0", "seq_id": 5, "path": "x"}
    save = operations.save("save_weights", request)
    load = {"path": "tinker://s1:train:0/weights/x"}
    assert save.save.name == load["path"]
    new = {"session_id": "s1", "model_seq_id": 1, "optimizer": True}
    first = operations.load_weights(load | new, config_of())
    assert (first.stream, first.number) == ("s1:train:1", 0)
    assert first.load == pb.Load(name=load["path"])
    with pytest.raises(Refused, match="tinker://newest goes on with its optimizer"):
        operations.load_weights(
            new | {"path": "tinker://newest", "optimizer": False}, config_of()
        )
    again = load | {"model_id": "m", "seq_id": 9, "optimizer": False}
    later = operations.load_weights(again, config_of())
    assert (later.stream, later.number, later.load.without_optimizer) == ("m", 9, True)


@pytest.mark.parametrize("ttl_s", [0, -1, 1e11, True, "60"])
def test_a_ttl_is_a_time_to_come(ttl_s: object) -> None:
    with pytest.raises(Refused, match="ttl_seconds is a number from 1 to 1e\\+10, got"):
        operations.save(
            "save_weights", {"model_id": "m", "seq_id": 5, "ttl_seconds": ttl_s}
        )


def test_a_publish_is_named_by_its_sampling_session_or_its_path() -> None:
    def published(**asked: str) -> pb.Operation:
        settings = {
            "model_id": "s1:train:0",
            "seq_id": 5,
            "sampling_session_seq_id": 2,
        } | asked
        return operations.save("save_weights_for_sampler", settings)

    assert published().publish == pb.Publish(name="s1:sample:2")
    in_flight = published(kind="inflight")
    assert in_flight.publish == pb.Publish(name="s1:train:0:inflight", in_flight=True)
    result = pb.OperationResult(name=in_flight.publish.name)
    session = operations.answer(in_flight.id, result)["sampling_session_id"]
    assert session == "s1:train:0:5+s1:train:0:inflight"
    assert operations.weights_of(session) == in_flight.publish.name
    assert (
        published(path="best").publish.name
        == "tinker://s1:train:0/sampler_weights/best"
    )


def test_the_sdk_reads_replies_and_passes() -> None:
    replies = pb.OperationResult(
        samples=[
            pb.Sampled(token_ids=ids(4, 9), logprobs=floats(-0.5, -0.25)),
            pb.Sampled(token_ids=ids(7), logprobs=floats(-1), truncated=True),
        ]
    )
    assert operations.sampled(replies).SerializeToString().hex() == READ_REPLIES
    replies.samples[0].prompt_logprobs = floats(-2, -3)
    scored = np.frombuffer(operations.sampled(replies).prompt_logprobs, "<f4")
    assert np.array_equal(scored, [np.nan, -2, -3], equal_nan=True)
    report = trainer_pb2.PassReport(
        logprobs=[floats(-1, -2), floats(-3)], metrics={"loss:sum": 1.5}
    )
    computed = operations.computed(pb.OperationResult(compute=report))
    assert computed.SerializeToString(deterministic=True).hex() == READ_PASS


def test_other_results_are_told_by_the_kind_in_their_id() -> None:
    step = pb.OperationResult(metrics={"grad_norm": 2.0})
    answer = operations.answer("s1:train:0:4:optim_step", step)
    assert (answer["type"], answer["metrics"]) == ("optim_step", {"grad_norm": 2.0})
    answer = operations.answer("s1:train:0:0:create_model", pb.OperationResult())
    assert answer["model_id"] == "s1:train:0"
    served = pb.OperationResult(name="s1:sample:2")
    answer = operations.answer("s1:train:0:5:save_weights_for_sampler", served)
    assert answer["sampling_session_id"] == "s1:sample:2"
    saved = pb.OperationResult(name="tinker://s1:train:0/weights/x")
    assert operations.answer("s1:train:0:6:save_weights", saved)["path"] == saved.name


def spoiled(**changes: object) -> wire.ForwardBackwardRequest:
    request = wire.ForwardBackwardRequest.FromString(SENT)
    inputs = request.data[0].loss_fn_inputs
    for name, value in changes.items():
        if name == "without":
            del inputs[value]
        elif name == "extra":
            inputs[value].CopyFrom(inputs["advantages"])
        elif name == "shape":
            inputs["target_tokens"].shape.append(2)
        elif name == "targets":
            inputs["target_tokens"].dense = np.array(value, "<i8").tobytes()
        elif name == "floats":
            inputs["target_tokens"].dtype = wire.FLOAT32
        elif name == "logprobs":
            inputs["logprobs"].dense = np.array(value, "<f4").tobytes()
        elif name == "image":
            request.data[0].model_input.add()
        elif name == "unknown":
            # A field of number 99 with the length 0.
            request.data[0].MergeFromString(b"\x9a\x06\x00")
        elif name.startswith("loss_fn_config"):
            request.ClearField("loss_fn_config")
            request.ClearField("loss_fn_config_v2")
            request.MergeFrom(wire.ForwardBackwardRequest(**{name: value}))
        else:
            request.MergeFrom(wire.ForwardBackwardRequest(**{name: value}))
    return request


def text(value: str) -> wire.LossConfigValue:
    return wire.LossConfigValue(text=value)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (
            {"loss_fn": "stable_reinforce"},
            "its formula is not published: name another loss_fn",
        ),
        (
            {"loss_fn": "other"},
            "loss_fn other is not served; there are cross_entropy, imp",
        ),
        (
            {"loss_fn_config": {"clip_low_threshold": -0.1}},
            "is a number from 0 to 1, got -0.1",
        ),
        (
            {"loss_fn_config": {"clip_high_threshold": 1e308}},
            "from 1 to 1e+09, got 1e+308",
        ),
        ({"loss_fn_config": {"clip_high_threshold": 0.9}}, "from 1 to 1e+09, got 0.9"),
        (
            {"loss_fn_config": {"clip_high_threshold": float("nan")}},
            "from 1 to 1e+09, got nan",
        ),
        (
            {"loss_fn_config_v2": {"fallback": text("ppo")}},
            "loss_fn ppo has no setting fallback",
        ),
        (
            {"unknown": 0},
            "datum 0 has a field 99, which the wire of tinker 0.38.0 does not have",
        ),
        (
            {"extra": "clip_low_threshold"},
            "clip_low_threshold is not served: loss_fn_config has",
        ),
        (
            {"extra": "sequence_ratio_mask"},
            "loss_fn ppo has no input sequence_ratio_mask",
        ),
        ({"loss_fn": "cross_entropy"}, "loss_fn cross_entropy has no setting clip_"),
        ({"loss_fn_config": {"beta": 1.0}}, "loss_fn ppo has no setting beta"),
        ({"without": "logprobs"}, "datum 0: loss_fn ppo needs logprobs"),
        ({"extra": "mask"}, "datum 0: loss_fn ppo has no input mask"),
        (
            {"shape": 0},
            "datum 0: target_tokens must be a dense tensor of one dimension",
        ),
        (
            {"targets": [2, -100, 4]},
            "target_tokens has -100, which is no token; advantages of 0 ",
        ),
        (
            {"targets": [2, 3, 1 << 32]},
            "target_tokens has 4294967296, which is no token",
        ),
        ({"floats": 0}, "datum 0: target_tokens must be integers"),
        (
            {"logprobs": [0.0, math.nan, -1.0]},
            "datum 0: logprobs has NaN, as replies have that were sampled with top_p below 1 or ",
        ),
        ({"image": 0}, "datum 0 has an image or sound; this server takes text"),
    ],
)
def test_a_pass_that_cannot_be_is_refused_in_one_line(change: dict, cause: str) -> None:
    with pytest.raises(Refused) as error:
        requested_passes.forward_backward(spoiled(**change))
    assert cause in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (
            {"topk_prompt_logprobs": 3},
            "topk_prompt_logprobs is not served; prompt_logprobs has",
        ),
        (
            {"topk_sample_logprobs": 3},
            "topk_sample_logprobs is not served; replies have",
        ),
        (
            {"target_prompt_logprobs": {"data": []}},
            "target_prompt_logprobs is not served",
        ),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n is not served"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not served"),
        (
            {"sampling_params": {"seed": -1}},
            "seed is a whole number from 0 to 4503599627370496",
        ),
        (
            {"sampling_params": {"stop": [7]}},
            "a stop token is a whole number from 0 to 6, got 7",
        ),
        (
            {"sampling_params": {"stop": [True]}},
            "a stop token is a whole number .*, got True",
        ),
        ({"sampling_params": {"min_p": 0.1}}, "SamplingParams has no field min_p"),
        ({"num_samples": 0}, "num_samples is a whole number from 1 to 65536, got 0"),
        (
            {"num_samples": "3"},
            "num_samples is a whole number from 1 to 65536, got '3'",
        ),
        (
            {"sampling_params": {"max_tokens": 9}},
            "room for 8 of a reply, got max_tokens = 9",
        ),
        (
            {"sampling_params": {"max_tokens": 0}},
            "max_tokens is a whole number from 1 to",
        ),
        (
            {"sampling_params": {"stop": ["x", ""]}},
            "a text in stop has a character at least",
        ),
        ({"sampling_params": {"top_p": 0}}, "top_p is above 0"),
        (
            {"prompt": {"chunks": [{"tokens": [1] * 16}]}},
            "of 16 tokens leaves room for 0",
        ),
        (
            {"prompt": {"chunks": [{"tokens": [6, 7]}]}},
            "has token 7, the vocabulary has 7",
        ),
        (
            {"prompt": {"chunks": [{"tokens": [6, -7]}]}},
            "has token -7, the vocabulary has 7",
        ),
        (
            {"prompt": {"chunks": [{"tokens": [1.5]}]}},
            "a prompt is a list of token ids",
        ),
        (
            {"prompt": {"chunks": [{"tokens": [[1], [2]]}]}},
            "a prompt is a list of token ids",
        ),
        ({"prompt": {"chunks": []}}, "one token at least"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "got a chunk of type image"),
        ({"sampling_session_id": None}, "create_sampling_client makes one"),
    ],
)
def test_a_sample_that_cannot_be_is_refused_in_one_line(
    change: dict, cause: str
) -> None:
    with pytest.raises(Refused, match=cause):
        operations.sample(SAMPLE | change, config_of(), 7)


def test_a_model_is_created_as_the_run_trains_it() -> None:
    assert operations.create_model(CREATE, config_of()).stream == "s1:train:0"
    assert operations.create_model(CREATE, config_of(lora={"rank": 8})).number == 0
    with pytest.raises(
        Refused, match=r"an adapter of rank 4 \(lora.rank\), not an adapter of ra"
    ):
        operations.create_model(CREATE, config_of(lora={"rank": 4}))
    attention = CREATE | {"lora_config": {"rank": 8, "train_mlp": False}}
    with pytest.raises(
        Refused, match="not linear_qkv and linear_proj alone, which a model of l"
    ):
        operations.create_model(attention, config_of(lora={"rank": 8}))
    settings = {"rank": 8, "target_modules": ["linear_qkv", "linear_proj"]}
    assert operations.create_model(attention, config_of(lora=settings)).number == 0
    with pytest.raises(
        Refused, match="this server has /.*/models/tiny only, not other"
    ):
        operations.create_model(CREATE | {"base_model": "other"}, config_of())
    with pytest.raises(Refused, match="the optimizer adamw only, not dimuon"):
        operations.create_model(
            CREATE | {"optimizer_config": {"type": "dimuon"}}, config_of()
        )
    with pytest.raises(Refused, match="Adam only"):
        operations.optim_step({"model_id": "m", "seq_id": 1, "optimizer_params": {}})


SEVERAL = {"rank": 64, "alpha": 16.0, "publish": "adapters", "adapters": ["a", "b"]}


def began(asked: dict, **changes: object) -> tuple:
    """Rank, alpha, seed and matrices with which one of several models begins."""
    config = config_of(lora=SEVERAL, run={"name": "own", "steps": 10, "seed": 5})
    begin = operations.create_model(
        CREATE | {"lora_config": asked} | changes, config
    ).begin
    values = begin.values
    return begin.adapter.rank, begin.adapter.alpha, values.seed, list(values.targets)


def test_each_of_several_models_begins_as_its_client_asks() -> None:
    attention = ["linear_qkv", "linear_proj"]
    mlp = ["linear_fc1", "linear_fc2"]
    assert began({"rank": 1}) == (1, 16.0, 5, attention + mlp)
    assert began({"rank": 64, "seed": 0, "train_mlp": False}) == (
        64,
        16.0,
        0,
        attention,
    )
    operation = began(
        {"rank": 2, "train_attn": False}, user_metadata={"lora_alpha": "4.5"}
    )
    assert operation == (2, 4.5, 5, mlp)
    for rank in (0, 65):
        with pytest.raises(
            Refused, match=f"a rank of 1 to 64 \\(lora.rank\\), got {rank}"
        ):
            began({"rank": rank})
    with pytest.raises(
        Refused, match="nothing is trained: lora.target_modules has linear_qkv"
    ):
        began({"rank": 1, "train_attn": False, "train_mlp": False})
    for alpha in ("x", "0", "-1", "nan", "inf"):
        with pytest.raises(
            Refused, match=f"lora_alpha is a number above 0, .* got '{alpha}'"
        ):
            began({"rank": 1}, user_metadata={"lora_alpha": alpha})
