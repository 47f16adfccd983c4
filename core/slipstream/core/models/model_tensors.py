"""Checks by the headers that a folder's files have every tensor that config.json asks for.

Megatron-Bridge 0.3.1 does not name a missing tensor: "Unknown parallelism type: None".
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.models.family import Experts, Shape
from slipstream.core.models.model_files import INDEX, LENGTH_BYTES, held_tensors, read_header
from slipstream.core.models.model_sizes import ModelSizes, read_model_table
from slipstream.core.models.nested_decoders import TOWERS, is_nested, nested_name, tower_name
from slipstream.core.models.registry import family_of

OUTPUT = "lm_head.weight"
# Endings of the matrix of embeddings.
_EMBEDDINGS = ("embed_tokens.weight", "backbone.embeddings.weight")
# Names of gate, up and down in a dense MLP.
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Folders of the tensors of towers, of all families.
TOWER_FOLDERS = ("visual.", "model.visual.", *TOWERS)
_BLOCK = re.compile(r".*?\.(blocks|layers|deepstack_merger_list)\.\d+\.")
_READ_BYTES = 1 << 24


def tensor_problems(
    folder: Path, setting: str, *, has_output: bool = True, has_tower: bool = False
) -> Iterator[str]:
    """Yields one clause for each tensor that is missing or has a wrong shape; for complete files.

    `setting` names the folder, of a supported architecture. The projection to the vocabulary is
    needed if `has_output`, the vision tower if `has_tower`. Further tensors do not matter, but for
    a tower beside a text class: it would be lost.
    """
    values = read_model_table(folder)
    held = held_tensors(folder)
    architecture = ModelSizes.of(values).folder_class
    needed = needed_tensors(values)
    if is_nested(values):
        needed = {nested_name(name, held): shape for name, shape in needed.items()}
    tower: dict[str, Shape] = {}
    if has_tower:
        try:
            tower = tower_tensors(values, held)
        except ConfigError as error:
            yield f"{setting}: {error}"
            return
        needed |= tower
    for name, shape in needed.items():
        if name.endswith(OUTPUT) and not has_output:
            continue
        if name not in held:
            yield (
                f"{setting} must hold every tensor of a {architecture}: "
                f"{_place(folder)} has no {name} of shape {list(shape)}"
            )
        elif held[name][1] != shape:
            path, found = held[name]
            yield (
                f"{setting} must hold tensors that fit its config.json: {path} has {name} "
                f"of shape {list(found)}, not {list(shape)}"
            )
    for name in further_blocks(tower, held)[:1] if has_tower else ():
        yield (
            f"{setting} must hold no more of a vision tower than vision_config says: "
            f"{held[name][0]} has {name}, which would be left out"
        )
    if has_output:
        yield from _output_problems(values, needed, held, setting)
    if not is_nested(values) and family_of(values).vision is None:
        for name in [name for name in held if name.startswith(TOWER_FOLDERS)][:1]:
            yield (
                f"{setting} must hold no vision tower for a {architecture}, which sees no "
                f"images: {held[name][0]} has {name}, which would be left out"
            )


def _output_problems(
    values: Mapping[str, Any],
    needed: Mapping[str, Shape],
    held: Mapping[str, tuple[Path, Shape]],
    setting: str,
) -> Iterator[str]:
    """Checks a projection that files hold beside tied embeddings.

    The learner would train the embeddings in its place, transformers and vLLM take it as it is.
    """
    output = nested_name(OUTPUT, held) if is_nested(values) else OUTPUT
    embedding = next(name for name in needed if name.endswith(_EMBEDDINGS))
    if output in needed or output not in held or embedding not in held:
        return
    (path, shape), (other, expected) = held[output], held[embedding]
    if shape != expected or not _are_equal((path, output), (other, embedding)):
        yield (
            f"{setting} must hold no {output} that differs from {embedding}, as config.json ties "
            f"them (tie_word_embeddings), {path} has one"
        )


def needed_tensors(values: Mapping[str, Any]) -> dict[str, Shape]:
    """Returns name and shape of each tensor, by the config.json of a known architecture."""
    sizes = ModelSizes.of(values)
    family = sizes.family
    if family.tensors is not None:
        return family.tensors(values, sizes.has_tied_output)
    needed: dict[str, Shape] = {"model.embed_tokens.weight": (sizes.vocab, sizes.hidden)}
    for layer in range(sizes.layers):
        mixer = _delta_net if _has_delta_net(values, layer) else _attention
        within = {**mixer(sizes, values), **_feed_forward(sizes, layer)}
        needed |= {f"model.layers.{layer}.{name}": shape for name, shape in within.items()}
    needed["model.norm.weight"] = (sizes.hidden,)
    if not sizes.has_tied_output:
        needed[OUTPUT] = (sizes.vocab, sizes.hidden)
    if family.vision is not None and (prefix := family.vision.prefix):
        needed = {name.replace("model.", prefix, 1): shape for name, shape in needed.items()}
    return needed


def _attention(sizes: ModelSizes, values: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, head = sizes.hidden, sizes.head_dim
    rows = {"q": sizes.heads * head, "k": sizes.kv_heads * head, "v": sizes.kv_heads * head}
    # Each query head has a gate of its output beside it.
    gates = {"q": rows["q"] if sizes.linear_heads else 0}
    family = sizes.family
    found: dict[str, Shape] = {f"{norm}_layernorm.weight": (hidden,) for norm in family.norms}
    if sizes.latent_size:
        return found | _latent_attention(sizes, values)
    found |= {
        f"self_attn.{name}_proj.weight": (size + gates.get(name, 0), hidden)
        for name, size in rows.items()
    }
    found["self_attn.o_proj.weight"] = (hidden, rows["q"])
    is_biased = family.attention_bias
    if isinstance(is_biased, str):
        is_biased = bool(values.get(is_biased))
    if is_biased:
        found |= {f"self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
    if family.has_sinks:
        found |= {"self_attn.o_proj.bias": (hidden,), "self_attn.sinks": (sizes.heads,)}
    if family.query_norm == "head" or values.get("use_qk_norm"):
        found |= {f"self_attn.{name}_norm.weight": (head,) for name in ("q", "k")}
    if family.query_norm == "whole":
        found |= {f"self_attn.{name}_norm.weight": (rows[name],) for name in ("q", "k")}
    return found


def _has_delta_net(values: Mapping[str, Any], layer: int) -> bool:
    if not values.get("linear_num_value_heads"):
        return False
    kinds = values.get("layer_types")
    if kinds is None:
        return bool((layer + 1) % values.get("full_attention_interval", 4))
    return bool(kinds[layer] == "linear_attention")


def _delta_net(sizes: ModelSizes, values: Mapping[str, Any]) -> dict[str, Shape]:
    hidden = sizes.hidden
    key_heads, heads = sizes.linear_heads
    key_dim, value_dim, kernel = (
        values.get(f"linear_{name}_dim", 0) for name in ("key_head", "value_head", "conv_kernel")
    )
    keys, inner = key_heads * key_dim, heads * value_dim
    found: dict[str, Shape] = {
        "conv1d.weight": (2 * keys + inner, 1, kernel),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "norm.weight": (value_dim,),
        "out_proj.weight": (hidden, inner),
    }
    inputs = {"qkv": 2 * keys + inner, "z": inner, "b": heads, "a": heads}
    if sizes.family.has_joined_inputs:
        inputs = {"qkvz": 2 * keys + 2 * inner, "ba": 2 * heads}
    found |= {f"in_proj_{name}.weight": (rows, hidden) for name, rows in inputs.items()}
    return {f"{norm}_layernorm.weight": (hidden,) for norm in sizes.family.norms} | {
        f"linear_attn.{name}": shape for name, shape in found.items()
    }


def _latent_attention(sizes: ModelSizes, values: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, queries, latent = sizes.hidden, sizes.query_latent_size, values["kv_lora_rank"]
    plain, turned, value = (values[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    rows = sizes.heads * (plain + turned)
    found: dict[str, Shape] = {
        "kv_a_proj_with_mqa": (latent + turned, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (sizes.heads * (plain + value), latent),
        "o_proj": (hidden, sizes.heads * value),
    }
    if queries:
        found |= {
            "q_a_proj": (queries, hidden),
            "q_a_layernorm": (queries,),
            "q_b_proj": (rows, queries),
        }
    else:
        found["q_proj"] = (rows, hidden)
    return {f"self_attn.{name}.weight": shape for name, shape in found.items()}


def _feed_forward(sizes: ModelSizes, layer: int) -> dict[str, Shape]:
    hidden = sizes.hidden
    if layer < sizes.dense_layers:
        return _gated("mlp.", _PROJECTIONS, hidden, sizes.ffn)
    experts = sizes.family.experts
    assert experts is not None, "a mixture of experts of a family without any"
    prefix, names = experts.prefix, experts.names
    found: dict[str, Shape] = {f"{prefix}{experts.router}.weight": (sizes.experts, hidden)}
    if experts.fused:
        found |= _fused_experts(sizes, experts)
    else:
        for expert in range(sizes.experts):
            found |= _gated(f"{prefix}experts.{expert}.", names, hidden, sizes.expert_ffn)
    if experts.has_choice_bias:
        found[f"{prefix}gate.e_score_correction_bias"] = (sizes.experts,)
    if experts.shared == "several":
        found |= _gated(f"{prefix}shared_experts.", names, hidden, sizes.shared_expert_ffn)
    elif sizes.shared_expert_ffn:
        # Every token goes to this expert, which has a gate of its own.
        found |= _gated("mlp.shared_expert.", _PROJECTIONS, hidden, sizes.shared_expert_ffn)
        found["mlp.shared_expert_gate.weight"] = (1, hidden)
    return found


def _fused_experts(sizes: ModelSizes, experts: Experts) -> dict[str, Shape]:
    """Returns the tensors of all experts together."""
    number, hidden, ffn = sizes.experts, sizes.hidden, sizes.expert_ffn
    shapes = {"gate_up": (hidden, 2 * ffn), "down": (ffn, hidden)}
    found: dict[str, Shape] = {
        f"mlp.experts.{name}_proj": (number, *(shape[::-1] if experts.fused == "turned" else shape))
        for name, shape in shapes.items()
    }
    if experts.is_biased:
        found[f"mlp.{experts.router}.bias"] = (number,)
        found |= {f"mlp.experts.{name}_proj_bias": (number, shapes[name][1]) for name in shapes}
    return found


def _gated(prefix: str, names: tuple[str, str, str], hidden: int, ffn: int) -> dict[str, Shape]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: (ffn, hidden), up: (ffn, hidden), down: (hidden, ffn)}


def _place(folder: Path) -> Path:
    """Returns the file that lists the tensors, for a message: index, single file, or folder."""
    paths = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        return folder / INDEX
    return paths[0] if len(paths) == 1 else folder


def tower_tensors(values: Mapping[str, Any], held: Collection[str]) -> dict[str, Shape]:
    """Returns name and shape of each tensor of a tower, in files with the tensors `held`.

    Raises ConfigError for sizes in vision_config that are no numbers, or do not fit the decoder.
    """
    family = family_of(values)
    if family.vision is not None:
        return family.vision.tower(values)
    assert family.nested is not None and family.nested.tower is not None, "no tower"
    found = family.nested.tower(values)
    return {tower_name(name, held): shape for name, shape in found.items()}


def further_blocks(tower: Collection[str], held: Collection[str]) -> list[str]:
    """Returns the names in `held` that lie in blocks of a tower beside those in `tower`."""
    known = {_block(name) for name in tower}
    return [name for name in held if name.startswith(TOWER_FOLDERS) and _block(name) not in known]


def _block(name: str) -> str:
    """Returns the part of a name up to the number of its block, or "" if it is in none."""
    found = _BLOCK.match(name)
    return found[0] if found else ""


def _are_equal(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Whether two matrices, each by its file and name, have the same bytes.

    Both have the same shape. Matrices of different element types count as different.
    """
    types = [read_header(path)[name]["dtype"] for path, name in (first, second)]
    if types[0] != types[1]:
        return False
    return all(one == other for one, other in zip(_blocks(*first), _blocks(*second), strict=True))


def _blocks(path: Path, name: str) -> Iterator[bytes]:
    begin, end = read_header(path)[name]["data_offsets"]
    with path.open("rb") as file:
        data = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
        file.seek(data + begin)
        for place in range(begin, end, _READ_BYTES):
            yield file.read(min(_READ_BYTES, end - place))
