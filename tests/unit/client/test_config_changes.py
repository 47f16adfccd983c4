"""What may change between the start of a run and its resume."""

import re
from pathlib import Path

import pytest
import tomli_w
from slipstream.client.resumed_settings import check_resumable
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from slipstream.core.models.model_files import tokenizer_digest
from slipstream.core.settings.config import Config
from slipstream.core.settings.section import Fixed, Growing
from slipstream.core.settings.sections import EnvironmentSection
from support.fakes.small_configs import SMALLEST, config_with, small_config


def config(**changes: object) -> Config:
    tables: dict[str, dict[str, object]] = {
        "algorithm": {"group_size": 4, "groups_per_step": 8}
    }
    for key, value in changes.items():
        section, name = key.split("__")
        tables.setdefault(section, {})[name] = value
    return small_config(**tables)


CHANGED = {
    "run.seed": 1,
    "model.path": "models/other",
    "model.dtype": "float32",
    "algorithm.group_size": 8,
    "algorithm.groups_per_step": 4,
    "algorithm.mini_batches": 2,
    "algorithm.epochs": 2,
    "sampling.temperature": 0.5,
    "checkpoint.load": "somewhere",
    "lora.rank": 16,
    "lora.alpha": 8.0,
    "lora.target_modules": ["linear_qkv"],
    "lora.publish": "adapters",
    "lora.adapters": ["math"],
}
# Settings without which a setting cannot be changed.
BESIDE = {
    "lora.alpha": {"lora__rank": 8},
    "lora.target_modules": {"lora__rank": 8},
    "lora.publish": {"lora__rank": 8},
    "lora.adapters": {"lora__rank": 8, "lora__publish": "adapters"},
}


def test_every_setting_that_must_stay_is_tried() -> None:
    assert Config.marked(Fixed).keys() == CHANGED.keys()
    assert list(Config.marked(Growing)) == ["run.steps", "algorithm.max_staleness"]


@pytest.mark.parametrize("key", Config.marked(Fixed))
def test_a_setting_that_recorded_steps_depend_on_must_stay(key: str) -> None:
    beside = BESIDE.get(key, {})
    changed = config(**beside, **{key.replace(".", "__"): CHANGED[key]})
    with pytest.raises(
        ConfigError, match=f"{key} must stay .* when a run goes on, got .*: "
    ):
        check_resumable(config(**beside), changed)


@pytest.mark.parametrize("key", Config.marked(Growing))
def test_a_bound_may_grow_and_not_shrink(key: str) -> None:
    small, large = (config(**{key.replace(".", "__"): n}) for n in (2, 3))
    check_resumable(small, large)
    with pytest.raises(
        ConfigError, match=f"{key} must be at least 3 when a run goes on, got 2"
    ):
        check_resumable(large, small)


def test_a_function_with_another_source_needs_a_word() -> None:
    name = "own_losses:loss"
    before, now = (
        config(algorithm__loss=name).model_copy(update={"sources": {name: digest}})
        for digest in ("1", "2")
    )
    check_resumable(before, before)
    with pytest.raises(
        ConfigError, match=f'{name}: changed since .*; .* run.resume = "changed"'
    ):
        check_resumable(before, now)
    accepted = now.run.model_copy(update={"resume": "changed"})
    check_resumable(before, now.model_copy(update={"run": accepted}))
    # A different function is a change of a setting like any other.
    check_resumable(config(), now)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "vocab.json",
        "special_tokens_map.json",
        "merges.txt",
        "additional_chat_templates/tools.jinja",
    ],
)
def test_a_tokenizer_that_has_changed_in_its_folder_needs_a_word(
    name: str, tmp_path: Path
) -> None:
    settings = tmp_path / "config.toml"
    model = tmp_path / "model"
    (model / name).parent.mkdir(parents=True)
    settings.write_text(tomli_w.dumps(SMALLEST | {"model": {"path": str(model)}}))
    (model / name).write_text("one")
    before = load_config(settings)
    check_resumable(before, load_config(settings))
    (model / "config.json").write_text("{}")
    (model / name).write_text("two")
    with pytest.raises(ConfigError, match=r"model\.path's tokenizer: changed"):
        check_resumable(before, load_config(settings))
    check_resumable(before, load_config(settings, ['run.resume="changed"']))
    # A run of an earlier version has noted none.
    check_resumable(before.model_copy(update={"sources": {}}), load_config(settings))


KL = {"algorithm": {"kl": {"coefficient": 0.1}}}


@pytest.mark.parametrize(
    ("setting", "folder", "tables"),
    [
        ("model.path", "model", {}),
        ("reference.path", "other", KL | {"reference": {"path": "other"}}),
        ("checkpoint.load", "other", {"checkpoint": {"load": "other"}}),
    ],
)
@pytest.mark.parametrize("data", [bytes(3 << 20), b"few"], ids=["large", "small"])
def test_first_weights_that_have_changed_need_a_word(
    setting: str,
    folder: str,
    tables: dict[str, dict[str, object]],
    data: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    name = (
        "iter_1/__0_0.distcp" if setting == "checkpoint.load" else "model.safetensors"
    )
    file = Path(folder, name)
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    table = SMALLEST | {"model": {"path": "model"}} | tables
    table["algorithm"] = SMALLEST["algorithm"] | tables.get("algorithm", {})
    settings = Path("config.toml")
    settings.write_text(tomli_w.dumps(table))
    before = load_config(settings)
    check_resumable(before, load_config(settings))
    # Training changes every tensor, but not the sizes.
    file.write_bytes(bytes(byte ^ 1 for byte in data))
    with pytest.raises(ConfigError, match=f"{re.escape(setting)}'s weights: changed"):
        check_resumable(before, load_config(settings))
    check_resumable(before, load_config(settings, ['run.resume="changed"']))


def test_a_chat_template_of_the_settings_that_has_changed_needs_a_word(
    tmp_path: Path,
) -> None:
    template = tmp_path / "a.jinja"
    other = tmp_path / "b.jinja"
    template.write_text("one")
    other.write_text("other")

    def loaded(path: Path) -> Config:
        settings = tmp_path / "config.toml"
        server = {"rollout_server": {"chat_template": str(path)}}
        settings.write_text(tomli_w.dumps(SMALLEST | server))
        return load_config(settings)

    before = loaded(template)
    template.write_text("two")
    with pytest.raises(ConfigError, match=r"the chat template .*a\.jinja: changed"):
        check_resumable(before, loaded(template))
    # A different file is a change of a setting like any other.
    check_resumable(before, loaded(other))


def test_a_folder_that_may_not_be_searched_is_no_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    def refuse(_: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "is_file", refuse)
    assert tokenizer_digest(tmp_path) == ""


CRITIC = {"algorithm__advantage": "gae", "critic__learning_rate": 1e-4}
REFERENCE = {"algorithm__kl": {"coefficient": 0.1}, "reference__refresh_every_steps": 2}


@pytest.mark.parametrize(
    ("key", "beside", "beside_without"),
    [
        ("critic", CRITIC, {}),
        ("drafts", {"drafts__tokens": 2}, {}),
        ("reference.refresh_every_steps", REFERENCE, {}),
        (
            "reference.refresh_every_steps",
            REFERENCE,
            REFERENCE | {"reference__refresh_every_steps": 0},
        ),
    ],
)
def test_a_model_that_checkpoints_hold_stays_and_none_is_added(
    key, beside, beside_without
):
    with_it = config(**beside)
    without = config(**beside_without)
    with pytest.raises(
        ConfigError, match=f"{key} cannot be left out when a run goes on"
    ):
        check_resumable(with_it, without)
    with pytest.raises(ConfigError, match=f"{key} cannot be added when a run goes on"):
        check_resumable(without, with_it)
    check_resumable(with_it, config(**beside, algorithm__learning_rate=1e-4))


def test_an_environment_stays_and_others_may_join() -> None:
    def environments(*names: str) -> Config:
        sections = tuple(
            EnvironmentSection(name=name, reference="m:E") for name in names
        )
        return config().model_copy(update={"environments": sections})

    check_resumable(environments("questions"), environments("other", "questions"))
    line = "environments must keep questions when a run goes on, got other: its groups are leased"
    with pytest.raises(ConfigError, match=line):
        check_resumable(environments("questions"), environments("other"))


def test_other_settings_may_change() -> None:
    check_resumable(
        config(),
        config(
            algorithm__learning_rate=1e-4,
            learner__world_size=4,
            learner__parallel={"tp": 2},
            queue__kind="redis",
            queue__redis_url="redis://127.0.0.1:6379/0",
            checkpoint__every_steps=7,
            # The digest of weights does not depend on it.
            weights__bucket_mib=1,
        ),
    )


def test_the_likely_tokens_of_a_reference_stay_and_its_address_may_change() -> None:
    def asking(top_k: int | None, port: int = 9000) -> Config:
        if top_k is None:
            return config()
        estimator = "forward_top_k" if top_k else "k2"
        server = {"base_url": f"http://127.0.0.1:{port}/v1", "model": "m"}
        return config(
            algorithm__kl={"coefficient": 1.0, "estimator": estimator},
            reference__server=server,
            reference__top_k=top_k,
        )

    check_resumable(asking(4), asking(4, port=9001))
    for before, now in ((4, 5), (0, 4), (None, 0), (0, None)):
        with pytest.raises(
            ConfigError, match=f"must stay {before} .*, got {now}: recorded"
        ):
            check_resumable(asking(before), asking(now))


def test_whether_a_server_scores_an_environment_stays() -> None:
    server = {"base_url": "http://127.0.0.1:9000/v1", "model": "m"}

    def taught(**teacher: object) -> Config:
        named = {"t": {"environments": ["e"], **teacher}}
        return config(algorithm__kl={"coefficient": 1.0}, reference__teachers=named)

    check_resumable(taught(path="one"), taught(path="other"))
    check_resumable(taught(path="one"), taught(policy=True))
    with pytest.raises(
        ConfigError, match="^reference.top_k of e must stay None .*, got 0: recorded"
    ):
        check_resumable(taught(policy=True), taught(server=server))
    with pytest.raises(ConfigError, match="of e must stay 0 .*, got None: recorded"):
        check_resumable(taught(server=server), config())


def test_an_environment_keeps_its_adapter() -> None:
    def with_adapter(name: str) -> Config:
        lora = {"rank": 8, "publish": "adapters", "adapters": ["code", "math"]}
        changed = config(**{f"lora__{key}": value for key, value in lora.items()})
        section = EnvironmentSection(name="e", reference="m:E", adapter=name)
        return changed.model_copy(update={"environments": (section,)})

    check_resumable(with_adapter("code"), with_adapter("code"))
    with pytest.raises(
        ConfigError, match="adapter of e must stay 'code' when .*, got 'math': "
    ):
        check_resumable(with_adapter("code"), with_adapter("math"))


def test_the_temperature_of_an_environment_must_stay_and_its_weight_may_change() -> (
    None
):
    def changed(**entry: float):
        entries = {"e": entry}
        return config(extensions__by_environment={"environments": entries})

    check_resumable(config(), changed(loss_weight=2.0))
    check_resumable(config(), changed(temperature=config().sampling.temperature))
    for before, now in (
        (config(), changed(temperature=0.5)),
        (changed(temperature=0.5), config()),
        (changed(temperature=0.5), changed(temperature=0.6)),
    ):
        with pytest.raises(
            ConfigError, match="temperature of e must stay .* when a run goes on"
        ):
            check_resumable(before, now)


def test_the_size_of_an_environments_groups_must_stay() -> None:
    def with_size(size: int):
        entries = {"e": {"group_size": size}}
        return config(extensions__by_environment={"environments": entries})

    plain_size = config().algorithm.group_size
    check_resumable(config(), with_size(plain_size))
    for before, now in (
        (config(), with_size(plain_size + 1)),
        (with_size(plain_size + 1), config()),
    ):
        with pytest.raises(
            ConfigError, match="group_size of e must stay .* when a run goes on"
        ):
            check_resumable(before, now)


# Images exclude records of what was left out, so that no ratio is right.
UNRECORDED = {
    "sampling.top_p": 0.9,
    "sampling.max_images": 1,
    "algorithm.weight": "none",
}
RECORDED = {"sampling.top_p": 0.9, "sampling.top_k": 50}
OWN = "extensions.by_environment.environments.math"
MATH: dict[str, object] = {
    "environments": [{"name": "math", "reference": "slipstream.environments.echo:Echo"}]
}


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"algorithm.weight": "token"}, "algorithm.weight = 'token'"),
        (
            {"algorithm.weight": "none", "algorithm.loss_args": {"ratio": "behavior"}},
            "algorithm.loss_args.ratio = 'behavior'",
        ),
        (
            {
                "algorithm.weight": "none",
                **MATH,
                f"{OWN}.loss": "ppo",
                f"{OWN}.loss_args": {"ratio": "behavior"},
            },
            "algorithm.loss_args.ratio = 'behavior'",
        ),
        (
            {"algorithm.weight": "none", "algorithm.loss": "own:loss"},
            "algorithm.loss = 'own:loss'",
        ),
    ],
)
def test_replies_of_an_unrecorded_cut_are_compared_with_no_policy_later(
    changes: dict[str, object], setting: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_resumable(config_with(MATH | UNRECORDED), config_with(changes))
    line = str(caught.value)
    assert line.startswith(f"{setting} must wait for a new run: ")
    assert "sampling.top_p = 0.9" in line


def test_a_run_that_compares_nothing_goes_on_without_its_cut() -> None:
    now = config_with({"algorithm.weight": "none"})
    check_resumable(config_with(UNRECORDED), now)


def test_replies_of_a_recorded_cut_keep_what_computes_over_its_tokens() -> None:
    now = config_with({"algorithm.agreement": "bits"})
    with pytest.raises(ConfigError, match="knows no part of the vocabulary"):
        check_resumable(config_with(RECORDED), now)


def test_replies_of_a_recorded_cut_keep_a_reference_that_knows_it() -> None:
    likely_tokens = {
        "reference.path": "model",
        "reference.top_k": 8,
        "algorithm.kl.coefficient": 0.1,
        "algorithm.kl.estimator": "forward_top_k",
    }
    now = config_with(likely_tokens)
    before = now.model_copy(update={"sampling": config_with(RECORDED).sampling})
    with pytest.raises(
        ConfigError, match=r"algorithm\.kl\.estimator = 'forward_top_k' must wait"
    ):
        check_resumable(before, now)


def test_a_recorded_cut_may_end_with_any_weight() -> None:
    check_resumable(
        config_with(RECORDED), config_with({"algorithm.weight": "sequence"})
    )
