"""Patches for faults of megatron-core 0.19.2 and megatron-bridge 0.6.2, on every device.

With other versions a patch is refused that does not find what it replaces.
"""

import functools
import importlib
import importlib.machinery
import importlib.util
import pkgutil
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import torch
from slipstream.core.errors import ConfigError
from slipstream.core.machine.description import installed
from slipstream.core.machine.process import without_collections
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.ranks import cpu
from slipstream.learner.trainer.ranks.cpu import hide_transformer_engine, substitute
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

TESTED_VERSIONS = {"megatron-core": "0.19.2", "megatron-bridge": "0.6.2"}
MUON_VERSIONS = {"emerging-optimizers": "0.3.0"}
_MODEL_FAMILIES = (
    "llama.llama_bridge",
    "qwen.qwen2_bridge",
    "qwen.qwen3_bridge",
    "qwen.qwen3_moe_bridge",
    "gpt_oss.gpt_oss_bridge",
)
_TE_STUBS = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")


@functools.cache
def has_transformer_engine() -> bool:
    """Whether TransformerEngine is installed and a GPU is available."""
    is_installed = importlib.util.find_spec("transformer_engine") is not None
    return is_installed and torch.cuda.is_available()


def check_installed(versions: Mapping[str, str] = TESTED_VERSIONS) -> str:
    """Returns what differs from `versions`; raises ConfigError for a package that is missing."""
    here = installed(versions)
    for name, tested in versions.items():
        if name not in here:
            raise ConfigError(f"{name} {tested} is required, but it is not installed")
    return ", ".join(
        f"{name} {here[name]} (tested: {tested})"
        for name, tested in versions.items()
        if here[name] != tested
    )


@functools.cache
@without_collections()
def install() -> Megatron:
    """Applies the patches at the first call, and returns Bridge's AutoBridge class.

    Raises ConfigError for a package that is missing, and for other versions that lack what the
    patches replace.
    """
    untested = check_installed()
    try:
        return _install()
    except (AttributeError, ImportError) as error:
        if not untested:
            raise
        raise ConfigError(f"the trainer cannot use {untested}: {error}") from error


def _install() -> Megatron:
    cpu.refuse_unused_gpus()
    cpu.install()
    # megatron.core decides at import whether TransformerEngine is installed: import it before the
    # stub exists.
    importlib.import_module("megatron.core.extensions.transformer_engine")
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    if has_transformer_engine():
        _cure_clipping()
        _use_swiglu_kernel()
    elif importlib.util.find_spec("apex") is None:
        optimizer: Megatron = importlib.import_module("megatron.core.optimizer")
        distributed: Megatron = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
        substitute(optimizer, {"Adam": GroupStepAdam, "USING_PYTORCH_OPTIMIZER": False})
        flags = dict.fromkeys(("HAVE_APEX_OR_TE", "USING_APEX_OPTIMIZER"), True)
        substitute(distributed, {"Adam": GroupStepAdam, **flags})
    auto_bridge = _import_bridge()
    # The imports register kinds of models and recipes that transformers and Bridge lack.
    importlib.import_module("slipstream.core.models.registered_kinds")
    families: types.ModuleType = importlib.import_module("slipstream.learner.trainer.families")
    for family in sorted(module.name for module in pkgutil.iter_modules(families.__path__)):
        importlib.import_module(f"{families.__name__}.{family}")
    # With a mask, cuDNN makes NaN of low scores in sequences of some lengths (9.19, Hopper).
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Bridge reads config.json under a lock in the home folder, and tries three more times in seven
    # seconds after a failure, as for a download. Here the model's folder is on a disk.
    for name in ("conversion.auto_bridge", "hf_pretrained.causal_lm"):
        module: Megatron = importlib.import_module(f"megatron.bridge.models.{name}")
        substitute(module, {"safe_load_config_with_retry": _read_config})
    # Megatron would put a norm on queries that are not of low rank, as in Moonlight, which has
    # none, and asks for layers of TransformerEngine. The parts of the spec are right.
    latent: Megatron = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    replacements: dict[str, object] = {"_resolve_qk_norm_config": lambda _, parts: vars(parts)}
    substitute(latent.MLASelfAttention, replacements)
    # TransformerEngine's product would read a router's bias in 16 bits as float32, the type of the
    # logits: wrong values, without an error.
    router: Megatron = importlib.import_module("megatron.core.transformer.moe.router")
    gating = router.router_gating_linear

    def biased(inp: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        logits: Tensor = gating(inp, weight, None, dtype)
        return logits if bias is None else logits + bias.to(dtype)

    substitute(router, {"router_gating_linear": biased})
    # A checkpoint may be loaded with another learning rate, which is no mark of a group.
    for name in ("optimizer", "distrib_optimizer"):
        part: Megatron = importlib.import_module(f"megatron.core.optimizer.{name}")
        keys = ("wd_mult", *part.param_group_identifier_keys[-3:])
        substitute(part, {"param_group_identifier_keys": keys})
    return auto_bridge


def _cure_clipping() -> None:
    # Megatron imports four names together. TransformerEngine 2.11 lacks the fourth, and without the
    # others a loop of Megatron's would wait for the GPU at each parameter.
    clipping: Megatron = importlib.import_module("megatron.core.optimizer.clip_grads")
    engine: Megatron = importlib.import_module("transformer_engine.pytorch.optimizers")
    kernels = {
        "multi_tensor_applier": engine.multi_tensor_applier,
        "l2_norm_impl": engine.multi_tensor_l2norm,
        "multi_tensor_scale_impl": engine.multi_tensor_scale,
    }
    substitute(clipping, kernels)


def _use_swiglu_kernel() -> None:
    # In a step of the 0.6B shape with 56,000 tokens on an H200, what torch compiles for SwiGLU's
    # gradient takes 19.6 ms, and this kernel 11.7. The host starts both kernels sooner.
    fused: Megatron = importlib.import_module("megatron.core.fusions.fused_bias_swiglu")
    kernels: Megatron = importlib.import_module("transformer_engine_torch")

    def forward(ctx: Megatron, x: Tensor, is_kept_in_fp8: bool, is_offloaded: bool) -> Tensor:
        saved_input = x.to(torch.float8_e4m3fn) if is_kept_in_fp8 else x
        if is_offloaded:
            saved_input.activation_offloading = True  # type: ignore[attr-defined]
        ctx.save_for_backward(saved_input)
        ctx.ori_input_dtype = x.dtype
        output: Tensor = kernels.swiglu(x, None)
        return output

    def backward(ctx: Megatron, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return kernels.dswiglu(grad.contiguous(), x.to(ctx.ori_input_dtype), None), None, None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    substitute(fused.SwiGLUFunction, methods)


def _read_config(path: str, *, trust_remote_code: bool, **keywords: object) -> Megatron:
    if trust_remote_code:
        raise ConfigError(f"code of a model's folder is never run, got {path}")
    transformers: Megatron = importlib.import_module("transformers")
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, **keywords)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path}/config.json cannot be used: {error}") from error


class GroupStepAdam(torch.optim.Optimizer):
    """Adam that counts its steps per parameter group, as apex and TransformerEngine do.

    The distributed optimizer saves and restores only that count. torch's Adam counts per
    parameter: after a resume all parameters would share one counter, and the bias correction would
    be wrong.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: object,
    ) -> None:
        self._is_decoupled = adam_w_mode
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates each parameter that has a gradient by one step; `closure` is ignored."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
                    self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
            adam(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                foreach=True,
                decoupled_weight_decay=self._is_decoupled,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


class _Stub(types.ModuleType):
    """A stub module whose attributes are empty classes, so that Bridge can be imported."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        stub = type(name, (), {"__module__": self.__name__})
        setattr(self, name, stub)
        return stub


def _import_bridge() -> Megatron:
    """Imports Bridge's recipes of `_MODEL_FAMILIES` alone, and returns AutoBridge.

    The others need packages such as mamba. Without TransformerEngine stubs stand in for it.
    """
    megatron: Megatron = importlib.import_module("megatron")
    folders = (Path(path) / "bridge" for path in megatron.__path__)
    root = next(folder for folder in folders if folder.is_dir())
    for name, folder in (("megatron.bridge", root), ("megatron.bridge.models", root / "models")):
        _register(name, types.ModuleType(name), [str(folder)])
    # With the version known, the stubs are no sign of an installed TransformerEngine.
    utils: Megatron = importlib.import_module("megatron.core.utils")
    utils.get_te_version()
    adapters: Megatron = importlib.import_module("megatron.bridge.peft.utils")
    # Without TransformerEngine the classes of layers that Megatron names after it are no types.
    substitute(adapters, {"HAVE_TE": has_transformer_engine()})
    stubs = () if adapters.HAVE_TE else _TE_STUBS
    for name in stubs:
        _register(name, _Stub(name), [])
    try:
        auto_bridge = importlib.import_module("megatron.bridge.models.conversion.auto_bridge")
        for family in _MODEL_FAMILIES:
            importlib.import_module(f"megatron.bridge.models.{family}")
    finally:
        # Code that looks for TransformerEngine later must not find the stubs.
        for name in stubs:
            sys.modules.pop(name, None)
        hide_transformer_engine()
    return auto_bridge.AutoBridge


def _register(name: str, module: types.ModuleType, path: list[str]) -> None:
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = path
    module.__spec__ = spec
    module.__path__ = path
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
