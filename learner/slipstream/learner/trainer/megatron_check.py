"""Checks that Megatron accepts a run's settings.

The command `python -m slipstream.learner.trainer.megatron_check < FILE` creates Megatron's settings
objects as a rank does, but without ranks, weights or a GPU. It reads only config.json of the model.
"""

import sys
from contextlib import nullcontext

from slipstream.core.configuration.config_file import run_check
from slipstream.core.configuration.roles import named, role_settings
from slipstream.core.extension import check_process
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.ranks import compat


def check_settings(config: Config) -> None:
    """Raises ConfigError for settings that Megatron rejects, of all models, or the storage."""
    check_process(config)
    auto_bridge = compat.install()
    from slipstream.learner.trainer.model.recipe import (
        check_biases,
        ddp_config_of,
        optimizer_config_of,
        provider_of,
    )
    from transformers import AutoConfig

    for name, settings in {"": config, **role_settings(config)}.items():
        with named(config, name) if name else nullcontext():
            ddp_config_of(settings)
            optimizer_config_of(settings)
            hf_config = AutoConfig.from_pretrained(settings.model.path)
            bridge = auto_bridge.from_hf_config(hf_config)
            sizes = hf_config.get_text_config()
            provider = provider_of(bridge, sizes, settings, load_weights=False)
            if not name:
                check_biases(provider, settings)


if __name__ == "__main__":
    sys.exit(run_check(check_settings))
