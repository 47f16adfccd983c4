"""What Megatron's model is configured with for each tiny model of the parity rig, as text.

`PYTHONPATH=tests python -m support.rigs.provider_fields MODELS OUT` makes the models unless they
are there, and writes JSON: model -> field -> value.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

from slipstream.learner.trainer.ranks import compat

from support.fakes.parity_models import make_models
from support.fakes.small_configs import small_config

ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fields_of(model: Path) -> dict[str, str]:
    auto_bridge = compat.install()
    from slipstream.learner.trainer.model.recipe import provider_of
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(model)
    config = small_config(model={"path": str(model), "dtype": "bfloat16"})
    bridge = auto_bridge.from_hf_config(settings)
    provider = provider_of(
        bridge, settings.get_text_config(), config, load_weights=False
    )
    return {
        field.name: ADDRESS.sub("", repr(getattr(provider, field.name)))
        for field in dataclasses.fields(provider)
    }


if __name__ == "__main__":
    models, out = map(Path, sys.argv[1:])
    if not models.exists():
        models.mkdir(parents=True)
        make_models(models)
    found = {
        path.parent.name: fields_of(path.parent)
        for path in sorted(models.glob("*/config.json"))
    }
    out.write_text(json.dumps(found))
