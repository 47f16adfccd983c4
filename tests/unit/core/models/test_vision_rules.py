"""Which settings a model that sees images excludes, also one whose decoder is a text class."""

import json
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.configuration.roles import role_problems
from slipstream.core.errors import ConfigError
from slipstream.core.models.model_fields import field_problems, unknown_fields
from slipstream.core.models.model_rules import model_problems, vision_problems
from slipstream.core.models.model_sizes import ModelSizes, decoder_table
from slipstream.core.models.registry import nested_name
from support.fakes.small_configs import small_config

DECODER = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
SEEING = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "vision_config": {"deepstack_visual_indexes": [0, 1]},
    **DECODER,
}
QWEN35 = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": {"depth": 2}}
BLIND = {"architectures": ["Qwen3ForCausalLM"], **DECODER}
FP8 = {"quantization": "fp8_per_channel"}
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


def problems(values: dict[str, Any], changes: dict[str, Any]) -> list[str]:
    return list(vision_problems(small_config(**changes), ModelSizes.of(decoder_table(values))))


def test_images_need_a_model_that_sees() -> None:
    assert problems(SEEING, {"sampling": {"max_images": 2}}) == []
    (problem,) = problems(BLIND, {"sampling": {"max_images": 2}})
    assert problem.startswith("sampling.max_images must be 0 for a Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learner": {"parallel": {"cp": 2}, "world_size": 2}}, "learner.parallel.cp must be 1"),
        (
            {
                "algorithm": {"kl": {"coefficient": 0.1}},
                "reference": {"server": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}},
            },
            "reference.server gets no images",
        ),
        ({"learner": {"transformer": FULL}}, "learner.transformer.recompute_granularity must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_sees_excludes_what_cannot_be_or_was_not_tested(changes, named):
    found = problems(SEEING, changes)
    assert [problem for problem in found if problem.startswith(named)], found
    assert problems(BLIND, changes) == []


@pytest.mark.parametrize(
    ("changes", "table", "processor", "named"),
    [
        ({}, SEEING, {"patch_size": 14}, ""),
        ({}, BLIND, {}, "critic.path must see images if and only if the policy does, got a Qwen3F"),
        ({}, SEEING, {"patch_size": 16}, "critic.path must make the policy's tokens of images"),
        (
            {"parallel": {"cp": 2}},
            SEEING,
            {"patch_size": 14},
            "critic.parallel.cp must be 1 for a Qwen3VLForConditionalGeneration",
        ),
    ],
    ids=["alike", "blind", "processor", "cp"],
)
def test_a_critic_sees_the_images_of_the_policy(changes, table, processor, named, tmp_path):
    folders = {"policy": (SEEING, {"patch_size": 14}), "critic": (table, processor)}
    for name, (sizes, pixels) in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes))
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(pixels))
    config = small_config(
        model={"path": str(tmp_path / "policy")},
        algorithm={"advantage": "gae"},
        critic={"path": str(tmp_path / "critic"), "learning_rate": 1e-3, **changes},
        learner={"world_size": 2},
    )
    found = list(role_problems(config, ModelSizes.of(SEEING)))
    about = [each for each in found if "images" in each]
    assert [each.startswith(named) for each in about] == [True] * bool(named), found


MIXTURE = {"num_experts": 4}


@pytest.mark.parametrize(
    ("model", "max_images", "server", "named"),
    [
        (SEEING, 0, FP8, ""),
        (SEEING, 1, FP8, "rollout_server.quantization must be"),
        (SEEING | MIXTURE, 0, FP8, "rollout_server.quantization must be"),
        (QWEN35 | DECODER, 0, FP8, ""),
        (QWEN35 | DECODER, 1, FP8, "rollout_server.quantization must be"),
    ],
)
def test_fp8_beside_a_tower_is_for_text(model, max_images, server, named):
    changes = {
        "model": {"dtype": "bfloat16"},
        "algorithm": {"weight": "token"},
        "sampling": {"max_images": max_images},
        "rollout_server": server,
    }
    found = problems(model, changes)
    assert [problem.startswith(named) for problem in found] == [True] * bool(named), found


@pytest.mark.parametrize("model", [SEEING, QWEN35 | DECODER])
def test_router_replay_goes_with_images(model: dict[str, Any]) -> None:
    changes = {"algorithm": {"router_replay": "rollout"}, "sampling": {"max_images": 1}}
    assert problems(model | MIXTURE, changes) == []


MERGE_4 = SEEING | {"vision_config": {"deepstack_visual_indexes": [0, 1], "spatial_merge_size": 4}}


@pytest.mark.parametrize(
    ("table", "files", "differing"),
    [
        (SEEING, {"processor_config.json": {"image_processor": {"mean": 1}}}, ""),
        (
            SEEING,
            {
                "processor_config.json": {"image_processor": {"mean": 1}},
                "preprocessor_config.json": {"mean": 2},
            },
            "",
        ),
        (SEEING, {"processor_config.json": {}, "preprocessor_config.json": {"mean": 1}}, ""),
        (SEEING, {"processor_config.json": {"image_processor": {"mean": 2}}}, "mean 2, not 1"),
        (
            SEEING,
            {
                "processor_config.json": {"image_processor": {"mean": 2}},
                "preprocessor_config.json": {"mean": 1},
            },
            "mean 2, not 1",
        ),
        (SEEING, {}, "mean None, not 1"),
        (MERGE_4, {"preprocessor_config.json": {"mean": 1}}, "spatial_merge_size 4, not 2"),
        (
            SEEING | {"image_token_id": 7},
            {"preprocessor_config.json": {"mean": 1}},
            "image token 7, not 151655",
        ),
    ],
)
def test_pixels_and_tokens_are_compared_as_transformers_reads_them(
    table: dict[str, Any], files: dict[str, Any], differing: str, tmp_path: Path
) -> None:
    found = processor_problems(tmp_path, table, files)
    assert bool(found) == bool(differing), found
    if differing:
        assert found[0].endswith(f"in {tmp_path / 'reference'}: {differing}")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", '{"image_processor": 3}'])
@pytest.mark.parametrize("name", ["processor_config.json", "preprocessor_config.json"])
def test_a_file_of_an_image_processor_that_cannot_be_read_is_refused_by_name(name, text, tmp_path):
    if name.startswith("pre") and "3" in text:
        text = "3"
    with pytest.raises(ConfigError, match=f"{tmp_path / 'reference' / name}"):
        processor_problems(tmp_path, SEEING, {name: text})


def processor_problems(folder: Path, table: dict[str, Any], files: dict[str, Any]) -> list[str]:
    """Returns what is said of images of a reference with `files`, beside a usual policy."""
    folders = {"policy": (SEEING, {"preprocessor_config.json": {"mean": 1}})}
    folders["reference"] = (table, files)
    for name, (sizes, processors) in folders.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(sizes))
        for file, values in processors.items():
            text = values if isinstance(values, str) else json.dumps(values)
            (folder / name / file).write_text(text)
    config = small_config(
        model={"path": str(folder / "policy")},
        algorithm={"kl": {"coefficient": 0.1}},
        reference={"path": str(folder / "reference")},
    )
    return [each for each in role_problems(config, ModelSizes.of(SEEING)) if "images" in each]


@pytest.mark.parametrize(("token", "vocab"), [(99, 100), (100, 100), (-1, 100), (None, 151655)])
def test_the_token_of_images_is_one_of_the_vocabulary(token: int | None, vocab: int) -> None:
    table = SEEING | {"vocab_size": vocab} | ({} if token is None else {"image_token_id": token})
    found = problems(table, {"sampling": {"max_images": 2}})
    assert len(found) == (token != 99)
    if found:
        assert found[0] == (
            f"model.path: image_token_id of a Qwen3VLForConditionalGeneration must be a token of "
            f"the vocabulary, 0 to {vocab - 1}, got {151655 if token is None else token}"
        )


@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"])
def test_embeddings_are_tied_where_transformers_ties_them(name, outer, inner):
    import transformers

    def said(value: bool | None) -> dict[str, Any]:
        return {} if value is None else {"tie_word_embeddings": value}

    table = {"text_config": {**DECODER, **said(inner)}, **said(outer)}
    expected = getattr(transformers, f"{name}Config")(**table).tie_word_embeddings
    table = {"text_config": {**DECODER, **said(inner)}, **said(outer)}
    values = {"architectures": [f"{name}ForConditionalGeneration"], **table}
    assert ModelSizes.of(decoder_table(values)).has_tied_output == expected


# What a published Gemma 3 of 4B says: the rest are transformers' defaults.
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
MISTRAL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral", "patch_size": 14},
    "vision_feature_layer": -1,
}
CRITIC = {"algorithm": {"advantage": "gae"}, "critic": {"learning_rate": 1e-5}}


def with_text(values: dict[str, Any], **changes: object) -> dict[str, Any]:
    return {**values, "text_config": {**values["text_config"], **changes}}


@pytest.mark.parametrize("values", [GEMMA, MISTRAL], ids=["gemma", "mistral"])
def test_a_published_config_is_known_and_allowed(values: dict[str, Any]) -> None:
    table = decoder_table(values)
    assert unknown_fields(table) == []
    assert list(field_problems(table)) == []
    assert list(model_problems(ModelSizes.of(table))) == []
    assert problems(values, {}) == []


def test_fields_that_gemma_leaves_out_have_the_defaults_of_transformers() -> None:
    from transformers import Gemma3TextConfig

    expected = Gemma3TextConfig(**GEMMA["text_config"]).to_dict()
    table = decoder_table(GEMMA)
    compared = {name for name in table if name in expected} - {"dtype", "architectures"}
    assert len(compared) > 12
    for name in compared - {"transformers_version", "model_type", "eos_token_id"}:
        assert table[name] == expected[name], name
    sizes = ModelSizes.of(table)
    assert (sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.vocab) == (8, 4, 256, 262208)
    assert sizes.has_tied_output and sizes.uses_sliding_window


def test_files_decide_with_text_config_whether_embeddings_are_tied() -> None:
    assert not ModelSizes.of(decoder_table(MISTRAL)).has_tied_output
    # transformers 5 writes its default, which it does not follow for files with a projection.
    written = {**MISTRAL, "tie_word_embeddings": True}
    assert not ModelSizes.of(decoder_table(written)).has_tied_output
    tied = with_text(MISTRAL, tie_word_embeddings=True)
    assert ModelSizes.of(decoder_table(tied)).has_tied_output
    with pytest.raises(ConfigError, match="tie_word_embeddings must be the same"):
        decoder_table({**tied, "tie_word_embeddings": False})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": None}, "text_config of a Mistral3.* must be a table, got None"),
        ({"vision_config": {}}, "vision_config of a Mistral3.* must be a table, got {}"),
        ({"text_config": {"model_type": "mistral4"}}, "must be mistral or ministral3, got 'mist"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_another_decoder_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decoder_table({**MISTRAL, **changes})


def test_tensors_have_the_names_of_the_form_that_the_files_have() -> None:
    published, modules = ["language_model.model.norm.weight"], ["model.language_model.norm.weight"]
    for name, first, second in (
        ("model.norm.weight", published[0], modules[0]),
        ("lm_head.weight", "language_model.lm_head.weight", "lm_head.weight"),
    ):
        assert (nested_name(name, published), nested_name(name, modules)) == (first, second)


CP2 = {"learner": {"parallel": {"cp": 2}, "world_size": 2}}


@pytest.mark.parametrize("values", [GEMMA, MISTRAL], ids=["gemma", "mistral"])
def test_a_decoder_without_images_takes_layouts_of_its_text_class(values: dict[str, Any]) -> None:
    assert problems(values, CP2) == []
    outer = values["architectures"][0]
    for changes, named in (
        ({"lora": {"rank": 4}}, "lora.rank must be 0"),
        ({"rollout_server": {"quantization": "fp8_per_channel"}}, "rollout_server.quantization"),
        (CRITIC, "[critic] is not supported"),
        ({"sampling": {"max_images": 2}}, f"sampling.max_images must be 0 for a {outer}"),
    ):
        (problem,) = problems(values, changes)
        assert problem.startswith(named)


@pytest.mark.parametrize("values", [GEMMA, MISTRAL], ids=["gemma", "mistral"])
def test_a_critic_of_its_own_folder_has_no_tower(values: dict[str, Any], tmp_path: Path) -> None:
    plain = {**decoder_table(values)}
    del plain["vision_config"]
    for name, table in (("plain", plain), ("nested", values)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(table))
    policy = ModelSizes.of(plain)
    for name in ("plain", "nested"):
        critic = {**CRITIC["critic"], "path": str(tmp_path / name)}
        changes = {"model": {"path": str(tmp_path / "plain")}, "critic": critic}
        config = small_config(**changes, algorithm=CRITIC["algorithm"])
        expected = (
            []
            if name == "plain"
            else [
                f"[critic] is not supported for a {values['architectures'][0]} with a vision tower"
            ]
        )
        assert list(role_problems(config, policy)) == expected
