"""Reads the index of a torch_dist checkpoint, which torch keeps as a pickle.

This is the only module that may unpickle. It accepts only the plain records of
`torch.distributed.checkpoint`, so a file from an attacker cannot run code. Tensors and objects of a
checkpoint are read by `torch.load` with `weights_only`.
"""

import pickle
from enum import Enum
from pathlib import Path

from slipstream.core.errors import CheckpointError
from slipstream.protocol.bounds import one_line
from torch.distributed.checkpoint.metadata import Metadata

_ALLOWED = {
    "collections": {"OrderedDict"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata"},
    "pathlib": {"Path", "PosixPath"},
    "torch": {"Size", "device"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        "StorageMeta",
        "Metadata",
        "MetadataIndex",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
}
_DTYPES = {
    "bfloat16",
    "bool",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint8",
}

# Errors that unpickling of damaged bytes raises.
_OF_DAMAGE = (
    OSError,
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ValueError,
    TypeError,
    LookupError,
    OverflowError,
    MemoryError,
    ImportError,
)
# Most characters of a cause in an error message.
MAX_CAUSE = 200


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name in _ALLOWED.get(module, ()) or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")


def _member(kind: object, name: str) -> object:
    """Returns the enum member `name` of `kind`, which Python 3.11.2 pickles as a `getattr` call."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError("builtins.getattr has no place in the index of a checkpoint")
    return kind[name]


def read_index(path: Path) -> Metadata:
    """Returns the index in `path`; raises CheckpointError if this file holds no readable index."""
    try:
        with path.open("rb") as file:
            index = _Unpickler(file).load()
    except _OF_DAMAGE as error:
        cause = one_line(str(error) or type(error).__name__, MAX_CAUSE)
        raise CheckpointError(f"{path} cannot be read: {cause}") from error
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{path} holds a {type(index).__name__}, not the index")
    return index
