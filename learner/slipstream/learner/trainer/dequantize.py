"""Converts a folder with MXFP4 experts, as gpt-oss is published, to bfloat16.

Run it once before training: `python -m slipstream.learner.trainer.dequantize SOURCE TARGET`. The
new folder takes four times the disk space of the old folder; learner and rollout servers load it.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from slipstream.core.errors import USAGE_ERROR, ConfigError
from slipstream.core.models.model_files import held_tensors
from slipstream.core.models.model_sizes import read_model_table
from slipstream.learner.trainer.weights.export import HfFolderWriter
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

_BLOCKS, _SCALES = "_blocks", "_scales"


def main() -> int:
    """Converts the folder; returns 0 after it is written, 2 if `SOURCE` cannot be converted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a folder whose experts are MXFP4")
    parser.add_argument("target", type=Path, help="the folder to write")
    arguments = parser.parse_args()
    try:
        dequantize(arguments.source, arguments.target)
    except (ConfigError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def dequantize(source: Path, target: Path) -> None:
    """Converts `source` into `target`, which is replaced if it exists.

    Raises ConfigError if `source` has no MXFP4 experts.
    """
    values = read_model_table(source)
    method = values.get("quantization_config", {}).get("quant_method")
    if method != "mxfp4":
        raise ConfigError(f"quant_method of {source / 'config.json'} must be mxfp4, got {method!r}")
    writer = HfFolderWriter(target.with_name(f"{target.name}.partial"), lambda _: None)
    writer.begin(source)
    for name, tensor in _tensors(source):
        if not writer.has_room(tensor):
            writer.flush()
        writer.add(name, tensor)
    writer.forget("quantization_config")
    writer.finish("bfloat16", target)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the bfloat16 tensor of every weight."""
    places = {name: path for name, (path, _) in held_tensors(folder).items()}
    for name in sorted(places):
        if name.endswith(_BLOCKS):
            whole = name.removesuffix(_BLOCKS)
            blocks, scales = (_read(places, f"{whole}{kind}") for kind in (_BLOCKS, _SCALES))
            # One expert at a time: the routine needs much memory.
            experts = [slice(place, place + 1) for place in range(len(blocks))]
            found = [convert_moe_packed_tensors(blocks[one], scales[one]) for one in experts]
            yield whole, torch.cat(found)
        elif not name.endswith(_SCALES):
            yield name, _read(places, name).bfloat16()


def _read(places: dict[str, Path], name: str) -> Tensor:
    with safe_open(places[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


if __name__ == "__main__":
    sys.exit(main())
