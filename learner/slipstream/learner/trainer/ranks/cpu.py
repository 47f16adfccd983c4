# ruff: noqa: ANN401 - arguments of torch's functions are only passed on
"""Replacements for code that assumes a CUDA device, so that megatron-core runs on CPU and gloo.

With CUDA nothing is replaced. The replacements hold for the whole process, so use them only in a
process that only trains.
"""

import contextlib
import functools
import importlib.util
import logging
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from slipstream.core.errors import RunFailed
from slipstream.core.machine.gpus import list_gpus, visible_ids
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

# Python 3.11 lacks this name, the only one of Python 3.12 that Megatron and its optimizers need.
vars(typing).setdefault("override", typing_extensions.override)
_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")
_installed = False


class _Done:
    """A substitute for CUDA streams and events: CPU calls return when done, so all are equal."""

    device = _CPU

    def __init__(self, *_: object, **__: object) -> None: ...

    def _return(self, *_: object) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = _return

    def record_event(self, *_: object) -> "_Done":
        return _Done()

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Done)

    def __hash__(self) -> int:
        return 0


def install() -> None:
    """Makes all replacements; call it before the first import of megatron.core."""
    global _installed
    if torch.cuda.is_available() or _installed:
        return
    _installed = True
    # Megatron says at each start what it does without on a CPU, one module by a handler of its own.
    # On a GPU the same lines tell that a slower way is taken: they stay in the log.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("megatron.bridge.utils.import_utils").disabled = True
    warnings.filterwarnings("ignore", module="megatron")
    hide_transformer_engine()
    # The context of a device knows these functions themselves, as they are at its first use.
    with _CPU:
        torch.empty(0)
    substitute(torch, {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
    substitute(
        torch.cuda,
        {
            "current_device": lambda: _CPU,
            # Every name has a function of its own: torch.compile refuses to register one twice.
            "synchronize": lambda *_, **__: None,
            "set_device": lambda *_, **__: None,
            "empty_cache": lambda *_, **__: None,
            "Stream": _Done,
            "Event": _Done,
            "current_stream": lambda *_: _Done(),
            "stream": lambda _: contextlib.nullcontext(),
            "get_rng_state": _rng_state,
            "set_rng_state": _set_rng_state,
            "manual_seed": torch.manual_seed,
        },
    )
    _replace_tensor_methods()
    _replace_all_gather()
    hide_triton_kernels()
    _replace_megatron()
    # Deterministic sums over duplicate indices make the same batches give the same bits.
    torch.use_deterministic_algorithms(True)
    substitute(torch.utils.deterministic, {"fill_uninitialized_memory": False})


def refuse_unused_gpus() -> None:
    """Raises RunFailed if torch was built for GPUs and cannot use those that the driver shows.

    Such a rank would train on the CPU without a word.
    """
    if torch.version.cuda is None or torch.cuda.is_available():
        return
    names = visible_ids(os.environ, list_gpus())
    if names:
        raise RunFailed(
            f"the driver shows GPU {', '.join(names)}, but torch {torch.__version__} for CUDA "
            f"{torch.version.cuda} can use none: the driver may be for an older CUDA (`slipstream "
            'doctor` compares them); to train on the CPU, set CUDA_VISIBLE_DEVICES=""'
        )


def hide_transformer_engine() -> None:
    """Makes imports of an installed TransformerEngine fail when no GPU is available."""
    if not torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]


@contextlib.contextmanager
def shared_gloo_devices() -> Iterator[None]:
    """Makes groups that are created inside the context use the gloo devices of the default group.

    Megatron creates about 25 groups for a layout. With devices of its own each group has a thread
    that wakes up a hundred times a second, whether the group is used or not.
    """
    if torch.cuda.is_available():
        yield
        return
    gloo: Any = dist.ProcessGroupGloo
    shared: Any = distributed_c10d._get_default_group()._get_backend(_CPU).options

    class SharedGloo(gloo):  # type: ignore[misc]
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices = shared._devices
            options._threads = shared._threads
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    substitute(distributed_c10d, {"ProcessGroupGloo": SharedGloo})
    try:
        yield
    finally:
        substitute(distributed_c10d, {"ProcessGroupGloo": gloo})


def substitute(owner: object, values: dict[str, object]) -> None:
    """Replaces attributes of `owner`; raises AttributeError for a name that it lacks."""
    for name, value in values.items():
        getattr(owner, name)
        setattr(owner, name, value)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


def _replace_tensor_methods() -> None:
    def identity(self: object, *_: object, **__: object) -> object:
        return self

    real_type: Callable[..., Any] = torch.Tensor.type

    def type_name(
        self: torch.Tensor, dtype: object = None, *args: object, **kwargs: object
    ) -> object:
        # The optimizers pick their branch by the name "torch.cuda.FloatTensor".
        if dtype is None:
            return str(real_type(self)).replace("torch.", "torch.cuda.", 1)
        return real_type(self, dtype, *args, **kwargs)

    substitute(torch.Tensor, {"cuda": identity, "type": type_name})
    substitute(torch.nn.Module, {"cuda": identity})


def _replace_all_gather() -> None:
    """Makes `all_gather` accept parts of different sizes, as of ranks that share experts."""
    real_gather = dist.all_gather

    def padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])

    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if len({part.shape for part in tensor_list}) == 1:
            return real_gather(tensor_list, tensor, *args, **kwargs)
        length = max(len(part) for part in tensor_list)
        parts = [part.new_empty(length, *part.shape[1:]) for part in tensor_list]
        work = real_gather(parts, padded(tensor, length), *args, **kwargs)
        assert work is None, "only the synchronous form is replaced"
        for part, gathered in zip(tensor_list, parts, strict=True):
            part.copy_(gathered[: len(part)])
        return None

    substitute(dist, {"all_gather": all_gather})


def hide_triton_kernels() -> None:
    """Makes megatron.core and Muon importable without triton, whose kernels are for GPUs alone."""
    if importlib.util.find_spec("triton") is None:
        sys.modules["emerging_optimizers.triton_kernels"] = types.ModuleType("triton_kernels")
        names = ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel")
        module = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        vars(module).update(dict.fromkeys(names))
        sys.modules[module.__name__] = module


def _replace_megatron() -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    one_by_one = rope_utils._apply_rotary_pos_emb_thd

    def rotate(
        values: Any,
        bounds: Any,
        angles: Any,
        *rest: Any,
        cp_group: Any,
        **keywords: Any,
    ) -> Any:
        """Rotates all packed sequences at once; Megatron does so one after the other."""
        if rest or angles.size(0) == int(bounds[-1]):
            return one_by_one(values, bounds, angles, *rest, cp_group=cp_group, **keywords)
        size = cp_group.size()
        rank = cp_group.rank()
        parts = torch.split(values, (bounds.diff() // size).tolist())
        find = rope_utils._get_thd_freqs_on_this_cp_rank
        packed = torch.cat([find(rank, size, part, angles) for part in parts])
        rotated = rope_utils._apply_rotary_pos_emb_bshd(values.unsqueeze(1), packed, **keywords)
        return rotated.squeeze(1)

    substitute(rope_utils, {"_apply_rotary_pos_emb_thd": rotate})

    def stay(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    substitute(
        megatron_random, {"_get_cuda_rng_state": _rng_state, "_set_cuda_rng_state": _set_rng_state}
    )
    substitute(moe_utils, {"maybe_move_tensor_to_cpu": stay})
    substitute(token_dispatcher, {"maybe_move_tensor_to_cpu": stay})
