import json
from pathlib import Path

import pytest
import tomli_w
from pydantic import JsonValue
from slipstream.core.configuration.config_file import (
    check_model,
    dump_config,
    largest_trajectory_bytes,
    load_config,
    parse_config,
    with_first_line,
)
from slipstream.core.configuration.toml_text import parse_toml
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import address_parts
from slipstream.core.models.model_rules import stage_problems
from slipstream.core.models.model_sizes import read_model_sizes
from support.fakes.model_folders import write_loadable_files
from support.fakes.small_configs import config_with, refusal_of, refusals

Table = dict[str, JsonValue]
CONFIGS = sorted((Path(__file__).parents[4] / "deploy" / "configs").glob("*.toml"))


def model_folder(folder: Path, **sizes: JsonValue) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], **sizes})
    )
    write_loadable_files(folder)
    return folder


def test_the_smallest_table_is_enough() -> None:
    config = config_with()
    assert config.run_dir == Path("runs/test")
    assert config.algorithm.max_staleness == 2
    assert config.trajectory_bytes() == 2048 + 24 * 16


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configs_that_are_shipped_are_valid_and_come_back_from_their_dump(
    path, tmp_path
):
    config = load_config(path)
    copied = tmp_path / "dump.toml"
    copied.write_text(dump_config(config))
    assert load_config(copied) == config


def test_branches_add_to_the_size_of_a_trajectory_and_have_a_limit_of_their_own() -> (
    None
):
    config = config_with({"sampling.max_total_tokens": 256})
    assert (config.sampling.total_tokens, config.sampling.max_branches) == (256, 16)
    assert config.trajectory_bytes() == 2048 + 24 * 256
    many = config_with({"sampling.max_branches": 20})
    assert many.sampling.total_tokens == 16
    assert many.trajectory_bytes() == 2048 + 4 * 96 + 24 * 16


def test_context_parallel_ranks_share_an_episode_that_is_too_long_for_one() -> None:
    learner = {"world_size": 2, "micro_batch_tokens": 8, "parallel": {"cp": 2}}
    assert config_with({"learner": learner}).sampling.max_episode_tokens == 16


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "algorithm.max_stalenes",
            "unknown key 'algorithm.max_stalenes'; did you mean 'max_stale",
        ),
        ("trainer.x", "unknown key 'trainer'; known are run, model, "),
        (
            "algorithm.lr",
            "unknown key 'algorithm.lr'; verl's actor_rollout_ref.actor.optim.lr is "
            "algorithm.learning_rate here",
        ),
        (
            "learning_rate",
            "unknown key 'learning_rate'; did you mean 'algorithm.learning_rate', ",
        ),
        ("algoritm.group_size", "unknown key 'algoritm'; did you mean 'algorithm'?"),
        ("learner.parallel.tpp", "unknown key 'learner.parallel.tpp'; did you mean "),
        # A setting of another table.
        (
            "weights.ignore_eos",
            "unknown key 'weights.ignore_eos'; did you mean 'debug.",
        ),
        ("queue.zzzzzz", "unknown key 'queue.zzzzzz'; known are kind, redis_url, "),
        (
            "algorithm.groups",
            "unknown key 'algorithm.groups'; did you mean 'groups_per_step'?",
        ),
        (
            "sampling.max_tokens",
            "unknown key 'sampling.max_tokens'; prime-rl's orchestrator.sampling.max_tokens is "
            "sampling.max_reply_tokens here",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_right_one(
    path: str, message: str
) -> None:
    refusal = refusal_of({path: 1})
    assert refusal.startswith(message)
    # Notes on settings are none themselves.
    assert "automatic" not in refusal


def test_an_unknown_key_of_an_entry_is_refused_with_its_place() -> None:
    table = {"environments": [{"name": "a", "reference": "a:B", "wieght": 2}]}
    assert (
        refusal_of(table)
        == "unknown key 'environments.0.wieght'; did you mean 'weight'?"
    )


def test_all_missing_keys_are_named_in_one_line() -> None:
    def said(table: Table) -> str:
        with pytest.raises(ConfigError) as caught:
            parse_config(table, source="test")
        return str(caught.value).removeprefix("test: ")

    assert (
        said({"run": {"name": "a"}, "model": {"path": "b"}}) == "run.steps is required"
    )
    table: Table = {"run": {}, "environments": [{}]}
    assert said(table) == (
        "run.name, run.steps, model.path, environments.0.name and environments.0.reference are "
        "required"
    )
    # A mistyped key is why another one is missing.
    assert (
        said(table | {"modle": {"path": "x"}})
        == "unknown key 'modle'; did you mean 'model'?"
    )


def test_overrides_take_toml_values_and_reach_list_entries(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    config = config_with({"environments": [{"name": "a", "reference": "a:B"}]})
    file.write_text(dump_config(config))
    changed = load_config(
        file,
        [
            "algorithm.max_staleness=0",
            "--run.name=other",
            "environments.0.weight=2.5",
            'environments.0.args={digits = 3, operations = ["+"]}',
            "learner.offload.gradients=false",
            "queue={redis_url = 'redis://127.0.0.1:6379/0'}",
        ],
    )
    assert changed.algorithm.max_staleness == 0
    assert changed.run.name == "other"
    assert changed.environments[0].weight == 2.5
    assert changed.environments[0].args == {"digits": 3, "operations": ["+"]}
    assert changed.queue.kind == "redis"
    assert load_config(file) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.max_staleness", "an override is section.key=value, got "),
        ("run.steps=", "run.steps: input should be a valid integer"),
        ("run.stepz=3", "unknown key 'run.stepz'; did you mean 'steps'?"),
        ("run.name.x=3", "'run.name.x=3': run.name is no section"),
        ("run.name.x.y=3", "'run.name.x.y=3': run.name.x is no section"),
        ("environments.0.weight=3", "'environments.0.weight=3': there is no entry 0"),
        (
            "environments[0].weight=2",
            "an override is written with .0 in place of [0], environments.0.weight=2: got "
            "'environments[0].weight=2'",
        ),
        (
            "+run.steps=3",
            "an override is written without + or ~, run.steps=3: got '+run.steps=3'",
        ),
        (
            "environments=[]\nx=3",
            "an override has one value, got 'environments=[]\\nx=3'",
        ),
        ("environments.0=3", "'environments.0=3': there is no entry 0"),
        (
            "learner.devices=0",
            "learner.devices is a list: 'learner.devices=[0]' on a command line, got 0",
        ),
        (
            "rollout_server.devices=0,1",
            "rollout_server.devices is a list: 'rollout_server.devices=[0, 1]' on a command line",
        ),
        (
            "learner.devices=cuda:0",
            "a list: 'learner.devices=[0]' on a command line, got 'cuda:0'",
        ),
        ("learner.devices=0.5", "learner.devices is a list, got 0.5"),
        (
            "tracking.trackers=tensorboard",
            "tracking.trackers is a list: 'tracking.trackers=[\"tensorboard\"]' on a command line",
        ),
        (
            "learner.devices=[0.5]",
            "learner.devices.0: input should be a valid integer, got a",
        ),
        (
            "learner.ddp={x={y=nan}}",
            "learner.ddp.x.y: input should be a finite number, got nan",
        ),
    ],
)
def test_an_override_that_cannot_work_is_refused(override, message, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(dump_config(config_with()))
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert message in str(caught.value)


def test_an_entry_beyond_the_only_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    environment = {"name": "a", "reference": "m:A"}
    file.write_text(dump_config(config_with({"environments": [environment]})))
    with pytest.raises(ConfigError, match="there is no entry 1: there is one entry, 0"):
        load_config(file, ["environments.1.name=b"])


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("enforce_eager = True", "True is written true"),
        ("trackers = [False]", "False is written false"),
        ("python = None", "None is written by leaving the line out"),
    ],
)
def test_a_word_of_python_in_a_file_is_told_in_words_of_toml(
    line, hint, tmp_path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[run]\n{line}\n")
    with pytest.raises(
        ConfigError, match=f"is no TOML: Invalid value .at line 2.*: {hint}$"
    ):
        load_config(file)


def test_a_model_named_by_its_page_on_the_hub_is_told_its_name(tmp_path: Path) -> None:
    page = Path("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main")
    config = config_with({"model.path": page})
    with pytest.raises(
        ConfigError, match="without its address: Qwen/Qwen3-0.6B, got https:/hug"
    ):
        check_model(config)


def test_a_warmup_that_outlasts_the_run_is_told() -> None:
    settings = {"algorithm.warmup_steps": 10, "run.steps": 9}
    (warning,) = config_with(settings).training_warnings
    assert warning == (
        "algorithm.warmup_steps is 10, but 9 steps train the policy: the learning rate never rises "
        "to algorithm.learning_rate"
    )
    assert not config_with(settings | {"run.steps": 10}).training_warnings


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml: no such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match=r"broken.toml is no TOML: Expected ']'"):
        load_config(tmp_path / "broken.toml")
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(
        ConfigError, match=r"latin.toml: TOML is UTF-8, byte 5 \(0xe9\) is not"
    ):
        load_config(tmp_path / "latin.toml")
    with pytest.raises(ConfigError, match="Is a directory$"):
        load_config(tmp_path)
    # A file that a run wrote is not called no TOML when somebody has changed it.
    for data, cause in (
        (with_first_line("a = 1\n") + b"b = 2\n", "not what the run"),
        (b"", "empty"),
    ):
        (changed := tmp_path / "changed.toml").write_bytes(data)
        with pytest.raises(ConfigError, match=f"^{changed} is {cause}"):
            load_config(changed)


def test_an_error_says_whether_the_command_line_has_a_part_in_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump_config(config_with()))
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["algorithm.kl=0.1"])
    assert (
        str(caught.value)
        == "command line: algorithm.kl is a table of settings, got 0.1"
    )
    with pytest.raises(ConfigError, match=f"^{file} and command line: .*group_size"):
        load_config(file, ["rollout_server.max_episodes=1"])
    with pytest.raises(
        ConfigError, match="^command line: controller.address: an address is HOST:"
    ):
        load_config(file, ["run.steps=3", "controller.address=7071"])
    file.write_text(file.read_text().replace("[run]", "[run]\nstepz = 3", 1))
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["run.seed=3"])
    assert str(caught.value).startswith(f"{file}: unknown key 'run.stepz'")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("a" + ".a" * 100_000 + "=1", "a key has more than 100 parts"),
        ('"a b"' + '."="' * 5000 + "=1", "a key has more than 100 parts"),
        ("x={" + "a . " * 5000 + "a=1}", "a key has more than 100 parts"),
        ("a=" + "[" * 100_000, "maximum recursion depth exceeded"),
        ("a=" + "1" * 5000, r"Exceeds the limit \(4300 digits\)"),
    ],
)
def test_a_file_that_no_reader_finishes_is_one_line(tmp_path, text, cause):
    path = tmp_path / "bomb.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bomb.toml is no TOML: {cause}") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_texts_with_many_dots_are_settings():
    text = f"a = '{'.' * 1000} {'x.y ' * 1000}'\nb = '''\n{'word. ' * 99}'''"
    assert len(parse_toml(text)) == 2


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    config = config_with()
    file.write_text(dump_config(config), encoding="utf-8-sig")
    assert load_config(file) == config


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("localhost:1", ("localhost", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("a.b:0", ("a.b", 0)),
    ],
)
def test_an_address_has_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert address_parts(address) == parts


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:65536", "a b:1", "host:x"]
)
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(
        ConfigError, match="an address is host:port with a port up to 65535, got"
    ):
        address_parts(address)


def test_a_model_folder_must_be_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = config_with({"model.path": str(folder)})

    def problem() -> str:
        with pytest.raises(ConfigError) as caught:
            check_model(config)
        return str(caught.value)

    assert problem() == (
        f"model.path must be a Hugging Face folder, got {folder}, which does not exist"
    )
    folder.write_text("{}")
    assert problem() == (
        f"model.path must be a Hugging Face folder, got the file {folder}: name its folder, "
        f"{tmp_path}"
    )
    folder.unlink()
    folder.mkdir()
    assert problem() == (
        f"model.path must be a Hugging Face folder, but {folder} has no config.json"
    )
    (folder / "config.json").write_text("{")
    assert problem().startswith(f"{folder}/config.json: Expecting property name")
    (folder / "config.json").write_text("[]")
    assert problem() == f"{folder}/config.json must hold a table, got a list"
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert (
        problem() == f"model.path must hold safetensors weights, but {folder} has none"
    )
    model_folder(folder, num_attention_heads=2)
    check_model(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    refusals("""
sizes.num_hidden_layers = 6, learner = {world_size = 2, parallel = {pp = 2, vpp = 2}}
    learner.parallel.pp * vpp must divide the model's 6 layers, got 4
sizes.max_position_embeddings = 8
    sampling.max_episode_tokens must be at most the model's max_position_embeddings, got 16 and 8
sizes.num_attention_heads = 6, rollout_server.tensor_parallel_size = 4
    rollout_server.tensor_parallel_size must divide the model's 6 attention heads, got 4
sizes.num_hidden_layers = 3, rollout_server.pipeline_parallel_size = 4
    rollout_server.pipeline_parallel_size must be at most the model's 3 layers, got 4
sizes.architectures = ["Gemma3ForCausalLM"], model.dtype = "float16"
    model.dtype must be "bfloat16" for a Gemma3ForCausalLM: vLLM (0.32.0) does not compute it in
    float16, got 'float16'
"""),
)
def test_sizes_that_the_model_does_not_have_are_refused_before_it_is_loaded(
    changes: dict[str, Table], message: str, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path, **changes["sizes"])
    settings = {name: table for name, table in changes.items() if name != "sizes"}
    config = config_with({"model.path": str(folder)} | settings)
    with pytest.raises(ConfigError) as caught:
        check_model(config)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "num_hidden_layers": 4,
                "n_routed_experts": 4,
                "first_k_dense_replace": 2,
            },
            "must leave a layer with experts to the first stage: 2 of 4 layers have none, got 2",
        ),
        (
            {
                "architectures": ["Qwen3NextForCausalLM"],
                "num_hidden_layers": 4,
            },
            "must be 1 for a model with delta nets, which were not tried in stages, got 2",
        ),
    ],
)
def test_models_without_stages_are_refused(
    sizes: Table, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    fields = json.dumps(sizes)
    (folder / "config.json").write_text(fields)
    (line,) = stage_problems(read_model_sizes(folder), 2, has_tower=False)
    assert line == f"rollout_server.pipeline_parallel_size {words}"
    assert not [*stage_problems(read_model_sizes(folder), 1, has_tower=True)]


def test_a_vision_tower_has_no_stages(tmp_path: Path) -> None:
    fields = {"architectures": ["Qwen3VLForConditionalGeneration"]}
    fields |= {"num_hidden_layers": 4, "vision_config": {"depth": 1}}
    folder = model_folder(tmp_path, **fields)
    (line,) = stage_problems(read_model_sizes(folder), 2, has_tower=True)
    assert line == (
        "rollout_server.pipeline_parallel_size must be 1 for a model with a vision tower, which "
        "was not tried in stages, got 2"
    )


TOP_K = {"algorithm.kl": {"coefficient": 1.0, "estimator": "forward_top_k"}}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sampling.stop_token_ids": [2, 31]}, ""),
        (
            {"sampling.stop_token_ids": [2, 32]},
            "sampling.stop_token_ids must be token ids of the model, 0 to 31, got 32",
        ),
        (TOP_K | {"reference.top_k": 32}, ""),
        (
            TOP_K | {"reference.top_k": 33},
            "reference.top_k must be at most the model's 32 tokens, got 33",
        ),
    ],
)
def test_tokens_are_those_of_the_model(
    changes: Table, line: str, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path, vocab_size=32)
    config = config_with({"model.path": str(folder)} | changes)
    if not line:
        check_model(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_model(config)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{}", ""),
        ('{"eos_token_id": null}', ""),
        ('{"eos_token_id": [2, 3]}', ""),
        ('{"eos_token_id": "x"}', ": eos_token_id must be token ids, got 'x'"),
        ('{"eos_token_id": [2, 3.0]}', ": eos_token_id must be token ids, got 3.0"),
        ('{"eos_token_id": [2,', ": Expecting value: line 1 column 21 (char 20)"),
        ("[]", " must hold a table, got a list"),
    ],
)
def test_the_ends_of_replies_are_tokens_in_a_whole_file(
    text, line, tmp_path: Path
) -> None:
    config = config_with({"model.path": str(model_folder(tmp_path))})
    path = tmp_path / "generation_config.json"
    path.write_text(text)
    if not line:
        check_model(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_model(config)
    assert str(caught.value) == f"{path}{line}"


def test_router_replay_is_refused_for_dense_models_and_trajectories_that_grow_too_large(
    tmp_path,
):
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    }
    dense = model_folder(tmp_path / "dense", num_hidden_layers=4, **heads)
    experts = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 96,
    }
    names = {"architectures": ["Qwen3MoeForCausalLM"]}
    mixture = model_folder(
        tmp_path / "mixture", num_hidden_layers=48, **heads, **experts, **names
    )
    plain = {"model.path": str(mixture)}
    replay = plain | {"algorithm.router_replay": "rollout"}
    check_model(config_with(replay))
    with pytest.raises(
        ConfigError, match=r"router_replay = 'rollout' needs a mixture of experts"
    ):
        check_model(config_with(replay | {"model.path": str(dense)}))
    # 2 * 2 trajectories of 2048 + 16 * (24 + 384) bytes
    largest = 2048 + 16 * 408
    room = {"queue.max_bytes": 4 * largest - 1}
    check_model(config_with(plain | room))
    with pytest.raises(
        ConfigError, match=rf"{4 * largest} bytes, got .* adds 384 bytes"
    ):
        check_model(config_with(replay | room))
    enough = config_with(replay | {"queue.max_bytes": 4 * largest})
    check_model(enough)
    assert largest_trajectory_bytes(enough) == largest
    assert largest_trajectory_bytes(config_with()) == 2048 + 16 * 24
    long = {
        "sampling.max_episode_tokens": 100_000,
        "learner.micro_batch_tokens": 100_000,
    }
    with pytest.raises(ConfigError, match="too large to send"):
        check_model(config_with(replay | long | {"queue.max_bytes": 1 << 40}))


def test_the_url_of_a_queue_makes_it_one_of_redis() -> None:
    url = "redis://127.0.0.1:6379/0"
    assert config_with({"queue.redis_url": url}).queue.kind == "redis"
    line = "queue: redis_url is for kind = 'redis', and kind is 'grpc': leave one out"
    assert refusal_of({"queue.redis_url": url, "queue.kind": "grpc"}) == line
    assert refusal_of({"queue.kind": "redis"}) == (
        "queue: kind = 'redis' needs redis_url, the address of a Redis or Valkey server from 7.0 "
        "on that you start, such as redis://127.0.0.1:6379/0"
    )


NESTED = "x.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.... is nested more than 32 tables or lists deep"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = " + "{a=" * 100 + "[]" + "}" * 100 + "\n", NESTED),
        (
            "[run]\nsteps = 0x" + "f" * 5_000 + "\n",
            "run.steps must fit 64 bits, got a number of ",
        ),
        (
            "[[environments]]\nargs = { n = -9223372036854775809 }\n",
            "environments.0.args.n must f",
        ),
    ],
)
def test_settings_of_any_depth_and_size_are_refused_in_one_line(tmp_path, text, said):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(str(file))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(file)) + 200


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            ".".join("a" * 50_000) + "=1",
            "an override's key has at most 100 parts: 'a.a.a",
        ),
        ("run.steps=" + "9" * 5_000, "has no value: Exceeds the limit (4300 digits)"),
        (
            "run.steps=0x" + "f" * 5_000,
            "fffffff' must fit 64 bits, got a number of 20000 bits",
        ),
        (
            "run.steps=" + "[" * 5_000 + "]" * 5_000,
            "has no value: maximum recursion depth",
        ),
        (
            "run.steps={" + ".".join("a" * 100_000) + "=1}",
            "a key has more than 100 parts",
        ),
    ],
)
def test_an_override_of_any_depth_and_size_is_refused_in_one_line(override, said):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert said in str(caught.value)
    assert len(str(caught.value)) < 250


def test_what_is_no_setting_in_the_file_of_another_releases_run_is_told(
    tmp_path, caplog
):
    played = [{"name": name, "reference": "a:B"} for name in ("a", "held")]
    config = config_with({"environments": played[:1], "evaluations": played[1:]})
    table = parse_toml(dump_config(config))
    table["debug"]["head_dtype"] = "model"
    table["environments"][0]["algorithm"] = {
        "loss_weight": 0.5,
        "kl": {"coefficient": 0.1},
    }
    table["evaluations"][0]["pass_threshold"] = 0.5
    file = tmp_path / "config.toml"
    file.write_bytes(with_first_line(tomli_w.dumps(table)))
    assert load_config(file) == config
    gone = "environments.0.algorithm, evaluations.0.pass_threshold, debug.head_dtype"
    assert caplog.messages == [
        f"{file} is of another release: {gone} are no settings here"
    ]
