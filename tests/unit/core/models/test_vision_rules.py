"""Which settings a model that sees images excludes."""

import json
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.configuration.roles import role_problems
from slipstream.core.errors import ConfigError
from slipstream.core.models.model_rules import model_problems, vision_problems
from slipstream.core.models.model_sizes import ModelSizes, decoder_table
from support.fakes.small_configs import small_config

DECODER = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
SEEING = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "vision_config": {"deepstack_visual_indexes": [0, 1]},
    **DECODER,
}
QWEN35 = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "vision_config": {"depth": 2},
}
BLIND = {"architectures": ["Qwen3ForCausalLM"], **DECODER}
FP8 = {"quantization": "fp8_per_channel"}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 1,
}


def problems(values: dict[str, Any], changes: dict[str, Any]) -> list[str]:
    return list(
        vision_problems(small_config(**changes), ModelSizes.of(decoder_table(values)))
    )


def test_images_need_a_model_that_sees() -> None:
    assert problems(SEEING, {"sampling": {"max_images": 2}}) == []
    (problem,) = problems(BLIND, {"sampling": {"max_images": 2}})
    assert problem.startswith("sampling.max_images must be 0 for a Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"learner": {"parallel": {"cp": 2}, "world_size": 2}},
            "learner.parallel.cp must be 1",
        ),
        (
            {
                "algorithm": {"kl": {"coefficient": 0.1}},
                "reference": {
                    "server": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}
                },
            },
            "reference.server gets no images",
        ),
        (
            {"learner": {"transformer": FULL}},
            "learner.transformer.recompute_granularity must be",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_sees_excludes_what_cannot_be_or_was_not_tested(changes, named):
    lines = problems(SEEING, changes)
    assert [problem for problem in lines if problem.startswith(named)], lines
    assert problems(BLIND, changes) == []


@pytest.mark.parametrize(
    ("changes", "table", "processor", "named"),
    [
        ({}, SEEING, {"patch_size": 14}, ""),
        (
            {},
            BLIND,
            {},
            "critic.path must see images if and only if the policy does, got a Qwen3F",
        ),
        (
            {},
            SEEING,
            {"patch_size": 16},
            "critic.path must make the policy's tokens of images",
        ),
        (
            {"parallel": {"cp": 2}},
            SEEING,
            {"patch_size": 14},
            "critic.parallel.cp must be 1 for a Qwen3VLForConditionalGeneration",
        ),
    ],
    ids=["alike", "blind", "processor", "cp"],
)
def test_a_critic_sees_the_images_of_the_policy(
    changes, table, processor, named, tmp_path
):
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
    problems = list(role_problems(config, ModelSizes.of(SEEING)))
    about = [problem for problem in problems if "images" in problem]
    assert [problem.startswith(named) for problem in about] == [True] * bool(named), (
        problems
    )


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
    lines = problems(model, changes)
    assert [problem.startswith(named) for problem in lines] == [True] * bool(named), (
        lines
    )


@pytest.mark.parametrize("model", [SEEING, QWEN35 | DECODER])
def test_router_replay_goes_with_images(model: dict[str, Any]) -> None:
    changes = {"algorithm": {"router_replay": "rollout"}, "sampling": {"max_images": 1}}
    assert problems(model | MIXTURE, changes) == []


MERGE_4 = SEEING | {
    "vision_config": {"deepstack_visual_indexes": [0, 1], "spatial_merge_size": 4}
}


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
        (
            SEEING,
            {"processor_config.json": {}, "preprocessor_config.json": {"mean": 1}},
            "",
        ),
        (
            SEEING,
            {"processor_config.json": {"image_processor": {"mean": 2}}},
            "mean 2, not 1",
        ),
        (
            SEEING,
            {
                "processor_config.json": {"image_processor": {"mean": 2}},
                "preprocessor_config.json": {"mean": 1},
            },
            "mean 2, not 1",
        ),
        (SEEING, {}, "mean None, not 1"),
        (
            MERGE_4,
            {"preprocessor_config.json": {"mean": 1}},
            "spatial_merge_size 4, not 2",
        ),
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
    lines = processor_problems(tmp_path, table, files)
    assert bool(lines) == bool(differing), lines
    if differing:
        assert lines[0].endswith(f"in {tmp_path / 'reference'}: {differing}")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", '{"image_processor": 3}'])
@pytest.mark.parametrize("name", ["processor_config.json", "preprocessor_config.json"])
def test_a_file_of_an_image_processor_that_cannot_be_read_is_refused_by_name(
    name, text, tmp_path
):
    if name.startswith("pre") and "3" in text:
        text = "3"
    with pytest.raises(ConfigError, match=f"{tmp_path / 'reference' / name}"):
        processor_problems(tmp_path, SEEING, {name: text})


def processor_problems(
    folder: Path, table: dict[str, Any], files: dict[str, Any]
) -> list[str]:
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
    return [
        role_problem
        for role_problem in role_problems(config, ModelSizes.of(SEEING))
        if "images" in role_problem
    ]


@pytest.mark.parametrize(
    ("token", "vocab"), [(99, 100), (100, 100), (-1, 100), (None, 151655)]
)
def test_the_token_of_images_is_one_of_the_vocabulary(
    token: int | None, vocab: int
) -> None:
    table = (
        SEEING
        | {"vocab_size": vocab}
        | ({} if token is None else {"image_token_id": token})
    )
    lines = problems(table, {"sampling": {"max_images": 2}})
    assert len(lines) == (token != 99)
    if lines:
        assert lines[0] == (
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


# Fields that a published Gemma 3 of 4B has: the rest are transformers' defaults.


@pytest.mark.parametrize("name", ["Gemma3", "Mistral3"])
def test_a_text_model_within_one_with_a_tower_is_written_anew_first(name: str) -> None:
    architecture = f"{name}ForConditionalGeneration"
    decoder = {"model_type": "any", **DECODER}
    values = {
        "architectures": [architecture],
        "text_config": decoder,
        "vision_config": {"a": 1},
    }
    (problem,) = model_problems(ModelSizes.of(decoder_table(values)))
    assert f"of architecture {architecture}, which cannot be loaded" in problem
    assert problem.endswith("docs/guides/models.md shows how to write its text model")
