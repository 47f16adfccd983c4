"""Checks by headers that a folder has all files, and the tensors of its config.json.

Programs ignore superfluous tensors silently, and name few of those that are missing. So files are
compared with the numbers of their config.json, and each block with its neighbours.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.core.machine.files import open_regular
from slipstream.core.models.families import family_of
from slipstream.core.models.model_sizes import ModelSizes, read_model_sizes, read_model_table
from slipstream.core.settings.config import Config

# Files that hold a tokenizer's vocabulary, by transformers' names; one of them is enough.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# Beginnings of the names of all files from which a tokenizer and its chat template are made.
_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece")
_TEMPLATES = ("chat_template", "additional_chat_templates/")
INDEX = "model.safetensors.index.json"
# A safetensors file begins with 8 bytes, the length of its header, at most MAX_HEADER_BYTES.
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Endings of the projection to the vocabulary and of the matrix of embeddings.
_OUTPUT = "lm_head.weight"
_EMBEDDINGS = "embed_tokens.weight"
# Folders of the tensors of towers, of all families.
TOWER_FOLDERS = ("visual.", "model.visual.", "vision_tower.", "model.vision_tower.")
_BLOCK = re.compile(r"(.*?\b(?:layers|blocks|deepstack_merger_list))\.(\d+)\.(.+)")
_READ_BYTES = 1 << 24
# Pieces of a file of weights that tell it from another one: training changes all of a file.
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
# Shape of a tensor, and tensors of files: name -> file and shape.
Shape: TypeAlias = tuple[int, ...]
Held: TypeAlias = Mapping[str, tuple[Path, Shape]]


def missing_files(folder: Path, template: Path | None = None) -> list[str]:
    """Returns a line for each missing part of a model; `template` replaces the tokenizer's."""
    return [*missing_weights(folder, "model.path"), *missing_tokenizer(folder, template)]


def missing_tokenizer(folder: Path, template: Path | None) -> list[str]:
    """Returns a line on what the tokenizer lacks, or []; `template` is in place of its own."""
    rule = "model.path must hold the tokenizer too"
    if not (folder / "tokenizer_config.json").is_file():
        return [f"{rule}, but {folder} has no tokenizer_config.json"]
    if not any((folder / name).is_file() for name in VOCABULARIES):
        return [f"{rule}, but {folder} has none of {', '.join(VOCABULARIES)}"]
    for path in filter(Path.is_file, (folder / "tokenizer_config.json", folder / "tokenizer.json")):
        try:
            is_whole = path.read_bytes().rstrip().endswith(b"}")
        except OSError as error:
            return [f"{rule}, but {path} cannot be read: {error.strerror}"]
        if not is_whole:
            return [f"{rule}, but {path} is cut off: it does not end with }}"]
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (ValueError, RecursionError):
        # The tokenizer's own loader reports this fault.
        return []
    has_template = isinstance(settings, dict) and settings.get("chat_template")
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    if not (template or has_template or any((folder / name).exists() for name in files)):
        return [
            f"model.path must hold a tokenizer with a chat template, but {folder} has neither "
            "chat_template.jinja nor chat_template in tokenizer_config.json: name a file with one "
            "in rollout_server.chat_template"
        ]
    return []


def tokenizer_digest(folder: Path) -> str:
    """Returns a digest of the files of tokenizer and chat template; "" if one cannot be read."""
    names = (*_TOKENIZER, *_TEMPLATES)
    return files_digest(path for name in names for path in folder.glob(f"{name}*"))


def files_digest(paths: Iterable[Path]) -> str:
    """Returns a digest of names and bytes of the files among `paths`; "" if one cannot be read."""
    digest = hashlib.sha256()
    is_empty = True
    try:
        for path in sorted(filter(Path.is_file, paths)):
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
            is_empty = False
    except OSError:
        return ""
    return "" if is_empty else digest.hexdigest()


def weights_digest(folder: Path) -> str:
    """Returns a digest of names, sizes and samples of files of weights; "" if there are none."""
    digest = hashlib.sha256()
    names = ("*.safetensors", "*.distcp", "*/*.distcp")
    try:
        paths = sorted(path for name in names for path in folder.glob(name))
        for path in paths:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with open_regular(path) as file:
                for sample in range(_SAMPLES):
                    file.seek(size * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError:
        return ""
    return digest.hexdigest() if paths else ""


def missing_weights(folder: Path, setting: str) -> list[str]:
    """Returns a line for each fault in the weights' headers, as of an incomplete download."""
    if not any(folder.glob("*.safetensors")):
        if folder.parent.name == "snapshots":
            return [
                f"{setting} has no weights in the hub's cache yet, {folder}: a dry run brings none"
            ]
        return [f"{setting} must hold safetensors weights, but {folder} has none"]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    # Rollout servers read only this folder.
    is_served = setting == "model.path"
    if is_served and any(name.startswith("consolidated") for name in names):
        return [
            f"{setting} must not hold Mistral's own form beside that of Hugging Face, which "
            f"rollout servers would read in its place: remove consolidated*.safetensors and "
            f"params.json from {folder}"
        ]
    if "adapter_model.safetensors" in names:
        return [f"{setting} must not hold an adapter, as none is applied: merge it in {folder}"]
    return [f"{setting} must hold whole files: {damage}" for damage in _damages(folder, names)]


def _damages(folder: Path, names: list[str]) -> Iterator[str]:
    """Yields one clause for each file that is missing, cut off or no file of safetensors."""
    index = folder / INDEX
    if index.is_file():
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            yield f"{index} is no index of safetensors ({type(error).__name__}: {error})"
            return
        except OSError as error:
            yield f"{index} cannot be read: {error.strerror}"
            return
        for name in sorted(shards - set(names)):
            yield f"{folder / name} is missing, which {INDEX} names"
        names = [name for name in names if name in shards]
    for path in (folder / name for name in names):
        size = path.stat().st_size
        try:
            with open_regular(path) as file:
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            needed = LENGTH_BYTES + length
            if size < LENGTH_BYTES or length > MAX_HEADER_BYTES:
                raise ValueError(path)
            if size >= needed:
                ends = [tensor["data_offsets"][1] for tensor in read_header(path).values()]
                needed += max(ends, default=0)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            yield f"{path}, {size:,} bytes, does not begin as a safetensors file does"
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror}"
        else:
            if size < needed:
                yield f"{path} has {size:,} of {needed:,} bytes"


def read_header(path: Path) -> dict[str, Any]:
    """Returns dtype, shape and data_offsets of each tensor by name, from a complete file."""
    with open_regular(path) as file:
        header = json.loads(file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def held_tensors(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Returns file and shape of each tensor, or of those in the index, of complete files."""
    index = folder / INDEX
    if not index.is_file():
        paths = sorted(folder.glob("*.safetensors"))
        return {name: (path, shape) for path in paths for name, shape in _shapes(path).items()}
    shapes = cache(_shapes)
    places = json.loads(index.read_bytes())["weight_map"].items()
    files = {name: folder / file for name, file in places}
    return {
        name: (path, shapes(path)[name]) for name, path in files.items() if name in shapes(path)
    }


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor["shape"]) for name, tensor in read_header(path).items()}


def is_further(name: str, *, layers: int) -> bool:
    """Whether a tensor is of a layer that predicts further tokens, which is not loaded."""
    place = _LAYER.match(name)
    is_apart = name.startswith(("mtp.", "model.mtp_layers."))
    return is_apart or (place is not None and int(place[1]) >= layers)


def is_untrained(name: str, sizes: ModelSizes) -> bool:
    """Whether a tensor is left as it is: of a layer for further tokens, or of an idle tower."""
    is_in_decoder = name.startswith(sizes.family.decoder_folder)
    return not is_in_decoder or is_further(name, layers=sizes.layers)


def loaded_tensors(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each tensor of `config.model.path` that a run loads."""
    tensors = held_tensors(config.model.path)
    if not tensors:
        return
    sizes = read_model_sizes(config.model.path)
    for name, (_, shape) in tensors.items():
        if not is_untrained(name, sizes):
            yield name, shape


def tensor_problems(
    folder: Path,
    setting: str,
    *,
    has_output: bool = True,
    has_tower: bool = False,
) -> Iterator[str]:
    """Yields one message for each fault of the tensors in `folder`, compared with its config.json.

    Call it only after the files were found complete (none missing or cut off). `setting` is the
    setting that names `folder`; the architecture must be supported. The output projection is
    required if `has_output`, the vision tower if `has_tower`. A vision tower is a fault if the
    architecture sees no images, and so is a block of a tower beyond the number in config.json. Of
    several missing layers only the first is named.
    """
    values = read_model_table(folder)
    sizes = ModelSizes.of(values)
    tensors = held_tensors(folder)
    # The file that lists the tensors.
    paths = sorted(folder.glob("*.safetensors"))
    place = paths[0] if len(paths) == 1 else folder
    place = folder / INDEX if (folder / INDEX).is_file() else place
    tower = {name: tensors[name] for name in tensors if name.startswith(TOWER_FOLDERS)}
    # Blocks that predict further tokens, and towers of which none is trained, are not loaded.
    decoder = {
        name: tensors[name] for name in tensors if not (name in tower or is_untrained(name, sizes))
    }
    every = f"{setting} must hold every tensor of a {sizes.architecture}: {place} has no "
    matrices = {"embeddings": _EMBEDDINGS}
    if has_output and not sizes.has_tied_output:
        matrices[_OUTPUT] = _OUTPUT
    yield from _matrix_problems(decoder, matrices, sizes, setting, every)
    stacks = _stacks(decoder)
    # transformers 5.19 names the layers of a Kimi K2.5 so that no program finds them again.
    if sizes.layers and not any(stack.endswith("layers") for stack in stacks):
        yield f"{every}layer 0"
    for stack, blocks in stacks.items():
        if missing := set(range(sizes.layers)) - blocks.keys():
            yield f"{every}layer {min(missing)}"
        yield from _differences(stack, blocks, setting)
    if has_tower:
        yield from _tower_problems(tower, values, setting, every)
    if has_output and sizes.has_tied_output:
        yield from _output_problems(decoder, setting)
    family = family_of(values)
    if tower and family.vision is None and not family.decoder_folder:
        name = next(iter(tower))
        yield (
            f"{setting} must hold no vision tower for a {sizes.architecture}, which sees no "
            f"images: {tensors[name][0]} has {name}, which would be left out"
        )


def _matrix_problems(
    decoder: Held,
    matrices: Mapping[str, str],
    sizes: ModelSizes,
    setting: str,
    every: str,
) -> Iterator[str]:
    """Yields one message for each matrix of the vocabulary that is missing or has another shape.

    `matrices` has the end of the tensor's name by what it is; `every` begins a message of a
    missing one.
    """
    for what, ending in matrices.items():
        name = next((name for name in decoder if name.endswith(ending)), None)
        if name is None:
            yield f"{every}{what}"
            continue
        path, shape = decoder[name]
        if shape != (sizes.vocab, sizes.hidden):
            yield (
                f"{setting} must hold tensors that fit its config.json: {path} has "
                f"{name} of shape {list(shape)}, not {[sizes.vocab, sizes.hidden]}"
            )


def _tower_problems(
    tower: Held,
    values: Mapping[str, Any],
    setting: str,
    every: str,
) -> Iterator[str]:
    """Yields one message for each fault of a vision tower; checks the number of blocks if known."""
    if not tower:
        yield f"{every}vision tower"
    depth = (values.get("vision_config") or {}).get("depth")
    for stack, blocks in _stacks(tower).items():
        yield from _differences(stack, blocks, setting)
        if depth is None or stack.endswith("_list"):
            continue
        if missing := set(range(depth)) - blocks.keys():
            yield f"{every}{stack}.{min(missing)}"
        if max(blocks) >= depth:
            name, (path, _) = next(iter(blocks[max(blocks)].items()))
            yield (
                f"{setting} must hold no more of a vision tower than vision_config says: {path} "
                f"has {stack}.{max(blocks)}.{name}, which would be left out"
            )


def _stacks(held: Held) -> dict[str, dict[int, dict[str, tuple[Path, Shape]]]]:
    """Returns the numbered blocks of each stack, such as model.layers, with their tensors."""
    stacks: dict[str, dict[int, dict[str, tuple[Path, Shape]]]] = {}
    for name, facts in held.items():
        if match := _BLOCK.match(name):
            stack = stacks.setdefault(match[1], defaultdict(dict))
            stack[int(match[2])][match[3]] = facts
    return stacks


def _differences(
    stack: str, blocks: Mapping[int, Mapping[str, tuple[Path, Shape]]], setting: str
) -> Iterator[str]:
    """Yields a clause for each block with other tensors or shapes than a block of its kind."""
    kinds = {frozenset(block): number for number, block in blocks.items()}
    for kind, number in kinds.items():
        for other, complete in kinds.items():
            if kind < other:
                lacking = min(other - kind)
                path = next(iter(blocks[number].values()))[0]
                yield (
                    f"{setting} must hold every tensor of a block: {path} has no "
                    f"{stack}.{number}.{lacking}, which {stack}.{complete} has"
                )
                return
    first: dict[str, tuple[int, Shape]] = {}
    for number, block in blocks.items():
        for name, (path, shape) in block.items():
            first_number, expected = first.setdefault(name, (number, shape))
            if shape != expected:
                yield (
                    f"{setting} must hold blocks of one form: {path} has {stack}.{number}.{name} "
                    f"of shape {list(shape)}, and {stack}.{first_number} of {list(expected)}"
                )
                return


def _output_problems(decoder: Held, setting: str) -> Iterator[str]:
    """Yields a clause if files hold an output projection that differs from tied embeddings."""
    output, embedding = (
        next((name for name in decoder if name.endswith(ending)), None)
        for ending in (_OUTPUT, _EMBEDDINGS)
    )
    if output is None or embedding is None:
        return
    (path, shape), (other, expected) = decoder[output], decoder[embedding]
    types = [read_header(path)[output]["dtype"], read_header(other)[embedding]["dtype"]]
    blocks = zip(_blocks(path, output), _blocks(other, embedding), strict=True)
    if shape != expected or types[0] != types[1] or any(ours != theirs for ours, theirs in blocks):
        yield (
            f"{setting} must hold no {output} that differs from {embedding}, as config.json ties "
            f"them (tie_word_embeddings), {path} has one"
        )


def _blocks(path: Path, name: str) -> Iterator[bytes]:
    begin, end = read_header(path)[name]["data_offsets"]
    with open_regular(path) as file:
        data = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
        file.seek(data + begin)
        for place in range(begin, end, _READ_BYTES):
            yield file.read(min(_READ_BYTES, end - place))
