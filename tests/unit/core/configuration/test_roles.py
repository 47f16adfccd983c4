"""The tables of reference and critic: what they need, what they refuse, what they stand for."""

import json
import tomllib
from pathlib import Path

import pytest
from pydantic import JsonValue
from slipstream.core.configuration.config_file import (
    check_model,
    dump_config,
    parse_config,
)
from slipstream.core.configuration.roles import (
    reference_is_policy,
    role_problems,
    role_settings,
)
from slipstream.core.errors import ConfigError
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config
from support.fakes.model_folders import write_loadable_files
from support.fakes.small_configs import SMALLEST, refusal_of, refusals, small_config

Table = dict[str, JsonValue]

LLAMA3_ROPE: Table = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GAE: Table = {"advantage": "gae"}
KL: Table = {"kl": {"coefficient": 0.1}}


def config_with(algorithm: Table, **tables: JsonValue) -> Config:
    return small_config(algorithm=algorithm, **tables)


def refusal(algorithm: Table, **tables: JsonValue) -> str:
    return refusal_of({"algorithm": SMALLEST["algorithm"] | algorithm} | tables)


def test_gae_and_the_critic_need_each_other() -> None:
    assert refusal(GAE) == "algorithm.advantage = 'gae' needs the table critic"
    assert refusal({}, critic={"learning_rate": 1e-3}) == (
        "the table critic has no effect with algorithm.advantage = 'grpo'"
    )
    config = config_with(GAE, critic={"learning_rate": 1e-3})
    assert list(config.roles) == ["critic"]
    # Over turns it does without.
    turns: Table = {"advantage": "turn_gae"}
    assert list(config_with(turns, critic={"learning_rate": 1e-3}).roles) == ["critic"]
    assert not config_with(turns).roles


def test_a_reference_without_a_penalty_is_refused() -> None:
    assert refusal({}, reference={}) == (
        "the table reference has no effect with algorithm.kl.coefficient = 0"
    )
    assert role_settings(config_with({})) == {}


def test_a_penalty_brings_the_default_reference_the_start_folder_in_the_policys_layout() -> (
    None
):
    learner: Table = {"world_size": 2, "parallel": {"tp": 2}}
    config = config_with(KL, learner=learner)
    settings = role_settings(config)["reference"]
    assert settings.model == config.model
    assert settings.learner == config.learner


def test_a_reference_has_its_own_folder_and_layout() -> None:
    learner: Table = {"world_size": 2, "parallel": {"tp": 2}, "transformer": {"a": 1}}
    reference: Table = {"path": "old", "parallel": {"pp": 2}}
    config = config_with(KL, learner=learner, reference=reference)
    settings = role_settings(config)["reference"]
    assert settings.model.path == Path("old")
    assert (settings.learner.parallel.pp, settings.learner.parallel.tp) == (2, 1)
    assert settings.learner.transformer == {"a": 1}
    assert config.model.path == Path("model")


def test_a_critic_has_a_rate_of_its_own_and_else_the_learners_settings() -> None:
    learner: Table = {
        "world_size": 2,
        "weight_decay": 0.5,
        "optimizer": {"a": 1},
        "ddp": {"b": 1},
    }
    config = config_with(GAE, learner=learner, critic={"learning_rate": 0.25})
    settings = role_settings(config)["critic"]
    assert settings.algorithm.learning_rate == 0.25
    assert settings.learner == config.learner


def test_layers_of_the_policys_stages_are_not_assigned_to_other_stages_of_a_role() -> (
    None
):
    stages: Table = {
        "num_layers_in_first_pipeline_stage": 1,
        "moe_router_dtype": "fp64",
    }
    learner: Table = {"world_size": 2, "parallel": {"pp": 2}, "transformer": stages}
    for own, expected in (
        ({"tp": 2}, ["moe_router_dtype"]),
        ({"pp": 2}, list(stages)),
        (None, list(stages)),
    ):
        role = {} if own is None else {"parallel": own}
        settings = role_settings(config_with(KL, learner=learner, reference=role))[
            "reference"
        ]
        assert list(settings.learner.transformer) == expected


@pytest.mark.parametrize("name", ["reference", "critic"])
def test_an_impossible_layout_names_the_role(name: str) -> None:
    algorithm = GAE | KL
    learner: Table = {"world_size": 2, "micro_batch_tokens": 16}
    tables: Table = {
        "learner": learner,
        "critic": {"learning_rate": 1e-3},
        "reference": {},
    }
    tables[name] = tables[name] | {"parallel": {"tp": 3}}  # type: ignore[operator]
    assert "3" in refusal(algorithm, **tables)
    tables[name] = tables[name] | {"parallel": {"vpp": 2}}  # type: ignore[operator]
    assert refusal(algorithm, **tables).startswith(
        f"unknown key '{name}.parallel.vpp'; an earlier Slipstream's {name}.parallel.vpp has no "
    )


def test_an_episode_must_fit_the_micro_batches_of_every_role() -> None:
    learner: Table = {"world_size": 2, "micro_batch_tokens": 8, "parallel": {"cp": 2}}
    config_with(KL, learner=learner)
    message = refusal(KL, learner=learner, reference={"parallel": {}})
    assert message.startswith("an episode must fit one micro batch of the reference")
    assert message.endswith("reference.parallel.cp = 8, got 16")


def model_folder(folder: Path, **changes: JsonValue) -> Path:
    sizes: Table = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes | changes))
    write_loadable_files(folder)
    return folder


def folder_refusal(folder: Path, **tables: JsonValue) -> str:
    model: Table = {"path": str(model_folder(folder / "policy"))}
    with pytest.raises(ConfigError) as caught:
        check_model(config_with(GAE | KL, **({"model": model} | tables)))
    return str(caught.value)


BPE: Table = {"vocab": {"a": 0, "b": 1}}
UNIGRAM: Table = {"vocab": [["a", 0.0], ["b", -1.0]]}


@pytest.mark.parametrize(
    ("model", "added", "said"),
    [
        (BPE, [{"id": 2, "content": "<s>"}, {"id": 3, "content": "<new>"}], ""),
        (UNIGRAM, [], ""),
        ({"vocab": {"b": 0, "a": 1}}, [], "token 0 is 'b', not 'a'"),
        ({"vocab": [["b", 0.0]]}, [], "token 0 is 'b', not 'a'"),
        (BPE, [{"id": 2, "content": "<e>"}], "token 2 is '<e>', not '<s>'"),
    ],
)
def test_a_role_reads_the_policys_tokens(
    model, added, said: str, tmp_path: Path
) -> None:
    folders = [model_folder(tmp_path / name) for name in ("policy", "other")]
    tokenizers = [{"model": BPE, "added_tokens": [{"id": 2, "content": "<s>"}]}]
    tokenizers.append({"model": model, "added_tokens": added})
    for folder, tokenizer in zip(folders, tokenizers, strict=True):
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = config_with(
        GAE | KL,
        model={"path": str(folders[0])},
        reference={"path": str(folders[1])},
        critic={"learning_rate": 1e-3},
        learner={"world_size": 3},
    )
    problems = [
        problem for problem in role_problems(config, read_model_sizes(folders[0]))
    ]
    expected = (
        f"reference.path must have the policy's tokens, but in {folders[1]} {said}"
    )
    assert problems == ([expected] if said else [])


MIXTURE: Table = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, []),
        (
            MIXTURE,
            [
                "learner.parallel.etp (None: tp) must divide the experts' intermediate size of 16, "
                "got 3"
            ],
        ),
    ],
)
def test_the_split_of_the_policys_experts_is_that_of_roles_with_experts(
    model, said, tmp_path
):
    policy = model_folder(
        tmp_path / "policy", **MIXTURE | {"moe_intermediate_size": 24}
    )
    config = config_with(
        KL,
        model={"path": str(policy)},
        reference={
            "path": str(model_folder(tmp_path / "other", **model)),
            "parallel": {"cp": 3},
        },
        learner={"world_size": 3, "parallel": {"etp": 3}},
    )
    assert list(role_problems(config, read_model_sizes(policy))) == said


@pytest.mark.parametrize("name", ["reference", "critic"])
def test_the_folder_of_a_role_is_checked_under_its_own_name(
    name: str, tmp_path: Path
) -> None:
    def refused(changes: Table, **role: JsonValue) -> str:
        path = str(model_folder(tmp_path / "other", **changes))
        tables: Table = {
            "learner": {"world_size": 3},
            "reference": {},
            "critic": {"learning_rate": 1e-3},
        }
        tables[name] = tables[name] | {"path": path} | role  # type: ignore[operator]
        return folder_refusal(tmp_path, **tables)

    parallel: Table = {"tp": 3}
    assert refused({}, parallel=parallel) == (
        f"{name}.parallel.tp must divide the model's 4 attention heads, got 3"
    )
    assert refused({"vocab_size": 99}).startswith(
        f"{name}.path must have the policy's vocabulary of 100 tokens, got 99"
    )
    assert refused({"max_position_embeddings": 8}).startswith(
        f"{name}.path must have room for sampling.max_episode_tokens = 16"
    )
    assert refused({}, path=str(tmp_path / "none")).startswith(
        f"{name}.path must be a Hugging Face folder"
    )


def test_a_role_needs_the_weights_of_its_folder(tmp_path: Path) -> None:
    other = model_folder(tmp_path / "other")
    (other / "model.safetensors").unlink()
    message = folder_refusal(
        tmp_path, critic={"learning_rate": 1e-3, "path": str(other)}
    )
    assert message == f"critic.path must hold safetensors weights, but {other} has none"


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 0.1},
        {"rope_theta": 500.0},
        {"rope_scaling": LLAMA3_ROPE},
        {"tie_word_embeddings": True},
        {"num_hidden_layers": 4},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_reference_that_is_refreshed_must_compute_as_the_policy_does(
    changes, tmp_path
):
    model = {"path": str(model_folder(tmp_path / "policy"))}
    tables = {
        "critic": {"learning_rate": 1e-3},
        "reference": {"path": str(tmp_path / "other")},
    }
    model_folder(tmp_path / "other", **changes)
    check_model(config_with(GAE | KL, model=model, **tables))
    tables["reference"]["refresh_every_steps"] = 3
    message = folder_refusal(tmp_path, **tables)
    assert message.startswith("reference.refresh_every_steps must be 0")


SERVER: Table = {"base_url": "http://127.0.0.1:9000/v1", "model": "teacher"}
FORWARD: Table = {"kl": {"coefficient": 1.0, "estimator": "forward_top_k"}}


def test_a_reference_behind_a_server_loads_no_model() -> None:
    for table in ({"lora": {"rank": 8}}, {}):
        config = config_with(KL, reference={"server": SERVER}, **table)
        assert role_settings(config) == {}
        assert not reference_is_policy(config)
        # The settings as a run writes them are read again.
        again = parse_config(tomllib.loads(dump_config(config)), source="config.toml")
        assert again == config


def test_likely_tokens_of_a_reference_make_trajectories_larger() -> None:
    plain = config_with(KL).trajectory_bytes()
    sampled = config_with(KL, reference={"server": SERVER}).trajectory_bytes()
    likely = config_with(
        FORWARD, reference={"server": SERVER, "top_k": 5}
    ).trajectory_bytes()
    assert (sampled - plain, likely - plain) == (16 * 4, 16 * 44)


@pytest.mark.parametrize(
    ("tables", "cause"),
    refusals("""
kl.estimator = "forward_top_k"
    algorithm.kl.estimator = 'forward_top_k' needs reference.top_k >= 1, got 0
kl.estimator = "forward_top_k", reference = {}
    algorithm.kl.estimator = 'forward_top_k' needs reference.top_k >= 1, got 0
reference.top_k = 2
    reference.top_k must be 0 unless a kl.estimator is forward_top_k or reverse_top_k, got 2
kl = {estimator = "forward_top_k", placement = "reward"}, reference.top_k = 2
    algorithm: kl.estimator = 'forward_top_k' is no cost of a sampled token: kl.placement must be
    'loss', got 'reward'
reference.refresh_every_steps = 2
    reference: refresh_every_steps has no effect with the table server: the ranks load no reference
reference.policy = true
    reference: policy = true excludes the table server: a teacher is one of them
"""),
)
def test_servers_of_a_reference_that_cannot_work_are_refused(tables, cause) -> None:
    penalty = {"kl": {"coefficient": 1.0} | tables.get("kl", {})}
    served = {"reference": {"server": SERVER} | tables.get("reference", {})}
    assert refusal(penalty, **(served if "reference" in tables else {})) == cause


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (
            {"reference": {"policy": True, "refresh_every_steps": 2}},
            "refresh_every_steps has no effect with policy = true: no model is loaded",
        ),
        (
            {"reference": {"policy": True}, "algorithm": {"router_replay": "rollout"}},
            "algorithm.router_replay must be 'off' with reference.policy = true",
        ),
    ],
)
def test_what_the_policy_as_its_own_teacher_excludes_is_refused(
    changes, cause: str
) -> None:
    algorithm = KL | changes.get("algorithm", {})
    assert cause in refusal(algorithm, reference=changes["reference"])


def test_a_policy_that_teaches_itself_takes_no_model_of_its_own() -> None:
    config = config_with(KL, reference={"policy": True})
    assert reference_is_policy(config)
    assert "reference" not in role_settings(config)


def test_a_server_answers_at_temperature_1_alone() -> None:
    sampling = {**SMALLEST["sampling"], "temperature": 0.8}
    assert refusal(KL, reference={"server": SERVER}, sampling=sampling) == (
        "reference.server needs sampling.temperature = 1: vLLM gives the log-probabilities of "
        "prompts at temperature 1, got 0.8"
    )


@pytest.mark.parametrize(
    "address", ["127.0.0.1:9000/v1", "http://127.0.0.1:9000", "http:///v1"]
)
def test_the_address_of_a_reference_is_that_of_an_openai_api(address: str) -> None:
    cause = refusal(KL, reference={"server": SERVER | {"base_url": address}})
    assert cause.startswith("reference.server.base_url: ")
    assert repr(address) in cause


TEACHERS: Table = {
    "math": {"environments": ["sums", "algebra"], "path": "teacher"},
    "code": {"environments": ["programs"], "server": SERVER},
    "itself": {"environments": ["proofs"], "policy": True},
}


def played(*names: str) -> list[Table]:
    return [{"reference": "m:E", "name": name} for name in names]


def test_each_environment_has_the_teacher_that_names_it() -> None:
    config = config_with(KL, reference={"teachers": TEACHERS}, environments=played("x"))
    assert config.reference is not None
    names = ("sums", "algebra", "programs", "proofs", "x", "")
    assert list(map(config.reference.teacher_of, names)) == [
        "math",
        "math",
        "code",
        "itself",
        "",
        "",
    ]
    server = config.reference.server_of("programs")
    assert server is not None
    assert server.base_url == SERVER["base_url"]
    assert config.reference.server_of("sums") is None
    assert config.reference.server_of("x") is None
    assert list(config.reference.servers) == ["reference.teachers.code.server"]
    again = parse_config(tomllib.loads(dump_config(config)), source="config.toml")
    assert again == config


def test_a_teacher_on_the_ranks_has_its_own_folder_and_layout() -> None:
    teachers = TEACHERS | {
        "wide": {"environments": ["w"], "path": "other", "parallel": {"tp": 2}}
    }
    config = config_with(
        KL,
        learner={"world_size": 2},
        reference={"teachers": teachers, "top_k": 0},
        environments=played("x"),
    )
    settings = role_settings(config)
    assert list(settings) == [
        "reference",
        "reference.teachers.math",
        "reference.teachers.wide",
    ]
    assert settings["reference"].model.path == Path("model")
    assert settings["reference.teachers.math"].model.path == Path("teacher")
    assert settings["reference.teachers.math"].learner.parallel.tp == 1
    assert settings["reference.teachers.wide"].learner.parallel.tp == 2
    assert config.role_folders == {
        "reference.teachers.math.path": Path("teacher"),
        "reference.teachers.wide.path": Path("other"),
    }


@pytest.mark.parametrize(
    ("environments", "reference", "is_loaded"),
    [
        (("sums", "programs"), {}, False),
        (("sums", "programs"), {"top_k": 0, "refresh_every_steps": 0}, False),
        (("sums", "programs"), {"path": "model"}, True),
        (("sums", "x"), {}, True),
        # Environments may be submitted, which nobody knows yet.
        ((), {}, True),
    ],
)
def test_the_reference_itself_is_there_only_if_an_environment_may_need_it(
    environments: tuple[str, ...], reference: Table, is_loaded: bool
) -> None:
    tables = {"reference": reference | {"teachers": TEACHERS}}
    config = config_with(KL, environments=played(*environments), **tables)
    assert ("reference" in role_settings(config)) == is_loaded
    refused = config.teacher_refusal("new")
    assert bool(refused) != is_loaded
    assert config.teacher_refusal("algebra") == ""
    if refused:
        assert refused == (
            "new must be among the environments of a teacher (math, code, itself): the run has "
            "no other reference model"
        )
    # With adapters it would be the policy without them.
    adapted = config_with(
        KL, environments=played(*environments), lora={"rank": 8}, **tables
    )
    assert reference_is_policy(adapted) == (is_loaded and "path" not in reference)


@pytest.mark.parametrize(
    ("teachers", "cause"),
    [
        (
            {"a": {"environments": ["e"]}},
            "a teacher needs exactly one of path, policy = true and the table server, got none",
        ),
        (
            {"a": {"environments": ["e"], "path": "p", "policy": True}},
            "a teacher needs exactly one of path, policy = true and the table server, got path "
            "and policy",
        ),
        (
            {"a": {"environments": ["e"], "policy": True, "parallel": {"tp": 1}}},
            "parallel has no effect with policy: no model is loaded",
        ),
        (
            {"a": {"environments": [], "policy": True}},
            "reference.teachers.a.environments",
        ),
        ({"a b": {"environments": ["e"], "policy": True}}, "reference.teachers.a b"),
        (
            TEACHERS | {"b": {"environments": ["algebra"], "path": "other"}},
            "teachers math and b both have the environment algebra: it has one teacher",
        ),
        (
            TEACHERS | {"b": {"environments": ["other"], "path": "teacher"}},
            "teachers math and b are the same model: name the environments of both in one",
        ),
    ],
)
def test_teachers_that_cannot_be_told_apart_are_refused(
    teachers: Table, cause: str
) -> None:
    assert cause in refusal(KL, reference={"teachers": teachers})


def test_what_excludes_one_reference_excludes_a_teacher_too() -> None:
    reference: Table = {"teachers": TEACHERS}
    assert refusal({}, reference=reference) == (
        "the table reference has no effect with algorithm.kl.coefficient = 0"
    )
    sampling = {**SMALLEST["sampling"], "temperature": 0.8}
    assert refusal(KL, reference=reference, sampling=sampling).startswith(
        "reference.teachers.code.server needs sampling.temperature = 1"
    )
    replay = KL | {"router_replay": "rollout"}
    assert refusal(replay, reference=reference).startswith(
        "algorithm.router_replay must be 'off' with reference.teachers.itself.policy = true"
    )
    cut = {**SMALLEST["sampling"], "top_p": 0.9}
    assert refusal(KL, reference=reference, sampling=cut).startswith(
        "reference.teachers.code.server excludes sampling.top_p = 0.9"
    )
    evaluations = [{"reference": "m:E", "name": "proofs"}]
    assert refusal(KL, reference=reference, evaluations=evaluations).startswith(
        "reference.teachers.itself.environments must be trained, got the evaluation proofs"
    )


def test_a_teacher_has_the_policys_tokens(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    model_folder(tmp_path / "teacher", vocab_size=8)
    teachers: Table = {"t": {"environments": ["e"], "path": str(tmp_path / "teacher")}}
    config = config_with(
        KL, model={"path": str(model)}, reference={"teachers": teachers}
    )
    sizes = read_model_sizes(tmp_path / "model")
    (problem,) = role_problems(config, sizes)
    assert problem.startswith(
        "reference.teachers.t.path must have the policy's vocabulary of 100 tokens, got 8"
    )
