"""The server's process starts no CUDA before vLLM forks its engine, whatever the family."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from make_tiny_vision_model import make_tokenizer
from slipstream.core.configuration.config_file import check_model
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from support.fakes.field_models import CASES, make_field_model
from support.fakes.published_qwen35 import write_as_published
from support.fakes.small_configs import config_of_engine
from support.fakes.tiny_models import make_seeing_model
from support.ranks.loader_ranks import in_ranks
from support.rigs.forking_engine import start_up_to_the_fork

pytestmark = pytest.mark.long

DELTA_NETS = ("qwen3-next", "qwen35", "qwen3_5")
LORA = {
    "rank": 8,
    "publish": "adapters",
    "target_modules": ["linear_qkv", "linear_proj"],
}
# Every family of decoders once, and families with a tower.
DECODERS = list({case.split(".")[0]: case for case in CASES}.values())
SEEING = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
QUICK = ("qwen3_5",)


def folder_of(family: str, folder: Path) -> Path:
    if family in SEEING:
        make_seeing_model(folder, family)
        if family.startswith("qwen3_5"):
            write_as_published(folder)
        return folder
    make_field_model(folder, family)
    config = (folder / family / "config.json").read_text()
    make_tokenizer(folder / family)
    (folder / family / "config.json").write_text(config)
    return folder / family


def config_of(folder: Path, *, has_adapters: bool) -> Config:
    name = folder.name
    lengths = {"max_reply_tokens": 8, "max_episode_tokens": 64}
    return config_of_engine(
        folder,
        model={"dtype": "bfloat16" if name.startswith(DELTA_NETS) else "float32"},
        sampling={**lengths, "max_images": int(name in SEEING)},
        lora=LORA if has_adapters else {},
    )


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
        for family in (*DECODERS, *SEEING)
    ],
)
def test_a_server_forks_its_engine_without_kernels_that_start_cuda(
    family: str, tmp_path: Path
):
    folder = folder_of(family, tmp_path / family)
    for has_adapters in (False, True):
        config = config_of(folder, has_adapters=has_adapters)
        try:
            check_model(config)
        except ConfigError as error:
            assert has_adapters
            assert str(error).startswith("lora."), error
            continue
        assert in_ranks(1, start_up_to_the_fork, config) == [[]]


async def test_a_server_that_started_cuda_does_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slipstream.rollout_server.vllm import engine
    from vllm.utils import system_utils

    ended: list[float] = []
    llm = SimpleNamespace(
        model_config=SimpleNamespace(return_sampling_mask=False),
        shutdown=lambda timeout: ended.append(timeout),
    )

    def spawned(*_: object, **__: object) -> SimpleNamespace:
        system_utils.get_mp_context()
        return llm

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr(engine, "engine_config", lambda *_: None)
    monkeypatch.setattr(engine.AsyncLLM, "from_vllm_config", spawned)
    monkeypatch.setattr(system_utils, "cuda_is_initialized", lambda: True)
    config = config_of(Path("model"), has_adapters=False)
    with pytest.raises(RuntimeError, match="vLLM forked no engine: CUDA was started"):
        await engine.VllmEngine.start(config, seed=1)
    assert len(ended) == 1
