"""Parallel layouts that must all train alike, and what they train.

A name says the sizes of a layout, what else differs, and the model where it is not the Llama.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from slipstream.core.reference_logprobs import ReferenceLogprobs
from slipstream.core.routed_experts import RoutedExperts
from slipstream.core.settings.config import Config
from slipstream.core.types import Trajectory
from slipstream.learner.trainer.batches.batch import Batch

from support.fakes.fake_controller import make_batch, with_branches
from support.fakes.parity_models import EXPERTS_PER_TOKEN, NUM_EXPERTS, NUM_LAYERS, VOCAB
from support.ranks.rank_pool import each_job
from support.ranks.rank_program import STEPS, settings_of


@dataclass(frozen=True)
class Layout:
    """How many ranks, which model, and what differs from `SETTINGS`."""

    world_size: int
    model: str = "llama"
    parallel: dict = field(default_factory=dict)
    learner: dict = field(default_factory=dict)
    algorithm: dict = field(default_factory=dict)
    # Episodes of several branches, with as many tokens together as `TREES` says.
    sampling: dict = field(default_factory=dict)
    # What others show too, so that it need not be tried at every change.
    is_slow: bool = False
    # Pipeline stages send what they hand on only a moment after they were asked to.
    is_slow_network: bool = False

    @property
    def reference(self) -> str:
        """The layout of one rank that does the same."""
        return next(
            name
            for name, layout in LAYOUTS.items()
            if layout.world_size == 1
            and (layout.model, layout.algorithm, layout.sampling)
            == (self.model, self.algorithm, self.sampling)
        )


SP = {"tp": 2, "sequence_parallel": True}
VPP = {"pp": 2, "vpp": 2}
DISTRIBUTED_OPTIMIZER = {"use_distributed_optimizer": True}
OVERLAP = DISTRIBUTED_OPTIMIZER | {
    "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000}
}
FULL_RECOMPUTE = {
    "transformer": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
}
SELECTIVE_RECOMPUTE = {"transformer": {"recompute_granularity": "selective"}}
MOE_RECOMPUTE = {
    "transformer": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
}
UNEVEN_STAGES = {"transformer": {"num_layers_in_first_pipeline_stage": 1}}
TWO_MINI_BATCHES = {"mini_batches": 2}
# Fewer sequences than replicas.
FEW = {"groups_per_step": 1, "group_size": 3}
# What is summed over sequences, or over all tokens of a batch, wherever they lie.
GSPO = {
    "mini_batches": 2,
    "loss": "gspo",
    "loss_args": {"clip_low": 3e-4, "clip_high": 4e-4},
    "aggregation": "sequence_mean",
    "entropy_coefficient": 0.1,
    "weight": "sequence",
    "weight_args": {"cap": 1.2},
}
CISPO = {
    "advantage": "reinforce_pp",
    "loss": "cispo",
    "loss_args": {"clip_high": 0.5},
    "aggregation": "fixed",
    "weight_args": {"cap": 2.0, "token_band": [0.2, 2.0], "sequence_band": [0.5, 1.1]},
}
# Two mini-batches: the policy before the step, too, must send the tokens where the rollout did.
REPLAY = {"router_replay": "rollout", "mini_batches": 2}
# Likely tokens of a reference behind a server.
TOP_K = 3
FORWARD = {"kl": {"coefficient": 0.5, "estimator": "forward_top_k"}}
REVERSE = {"mini_batches": 2, "kl": {"coefficient": 0.5, "estimator": "reverse_top_k"}}
TREES = {"max_total_tokens": 120}

OFFLOAD = {"offload": {"parameters": True, "gradients": True, "optimizer": True}}

# Every common beginning is computed once, however short.
SHARED = {"shared_prefix_tokens": 1}

LAYOUTS = {
    "one": Layout(1),
    "one-mini-batches": Layout(1, algorithm=TWO_MINI_BATCHES),
    "one-few": Layout(1, algorithm=FEW),
    "one-gspo": Layout(1, algorithm=GSPO),
    "one-cispo": Layout(1, algorithm=CISPO),
    "one-qwen3": Layout(1, "qwen3"),
    "one-qwen2": Layout(1, "qwen2"),
    "one-llama3": Layout(1, "llama3"),
    "one-tied": Layout(1, "tied"),
    # The folder is written when the memory of its tensors could be given away already.
    "one-odd": Layout(1, "odd", learner=OFFLOAD),
    "one-moe": Layout(1, "moe"),
    "one-moe-softmax": Layout(1, "moe-softmax"),
    "one-moe-shared": Layout(1, "moe-shared"),
    "one-mixtral": Layout(1, "mixtral"),
    "one-mistral": Layout(1, "mistral"),
    "one-ministral3": Layout(1, "ministral3"),
    "one-gemma2": Layout(1, "gemma2"),
    "one-gemma3": Layout(1, "gemma3"),
    "one-gemma3-tower": Layout(1, "gemma3-tower"),
    "one-ministral3-tower": Layout(1, "ministral3-tower"),
    "one-mistral-tower": Layout(1, "mistral-tower", is_slow=True),
    "one-glm": Layout(1, "glm"),
    "one-deepseek": Layout(1, "deepseek"),
    "one-moonlight": Layout(1, "moonlight"),
    "one-deepseek2": Layout(1, "deepseek2"),
    "one-deepseek2-lite": Layout(1, "deepseek2-lite"),
    "one-qwen3-next": Layout(1, "qwen3-next"),
    "one-nemotron-h": Layout(1, "nemotron-h"),
    "one-qwen35": Layout(1, "qwen35"),
    "one-qwen35-moe": Layout(1, "qwen35-moe", is_slow=True),
    "one-gpt-oss": Layout(1, "gpt-oss"),
    "one-olmo2": Layout(1, "olmo2"),
    "one-ernie": Layout(1, "ernie"),
    "one-olmoe": Layout(1, "olmoe"),
    "one-replay-moe": Layout(1, "moe", algorithm=REPLAY),
    "one-replay-moe-softmax": Layout(1, "moe-softmax", algorithm=REPLAY, is_slow=True),
    "one-replay-glm": Layout(1, "glm", algorithm=REPLAY),
    "one-replay-deepseek2": Layout(1, "deepseek2", algorithm=REPLAY),
    "one-replay-qwen35-moe": Layout(1, "qwen35-moe", algorithm=REPLAY, is_slow=True),
    "one-replay-gpt-oss": Layout(1, "gpt-oss", algorithm=REPLAY, is_slow=True),
    "one-forward-top-k": Layout(1, algorithm=FORWARD),
    "one-reverse-top-k": Layout(1, algorithm=REVERSE, is_slow=True),
    "one-trees-reverse-top-k": Layout(1, algorithm=REVERSE, sampling=TREES),
    "one-trees": Layout(1, sampling=TREES),
    "one-trees-shared": Layout(1, learner=SHARED, sampling=TREES),
    "one-trees-gspo": Layout(1, algorithm=GSPO, sampling=TREES),
    "one-trees-cispo": Layout(1, algorithm=CISPO, sampling=TREES, is_slow=True),
    "one-trees-moe": Layout(1, "moe", sampling=TREES, is_slow=True),
    "one-trees-replay-moe": Layout(1, "moe", algorithm=REPLAY, sampling=TREES),
    "dp2": Layout(2),
    "dp2-distopt": Layout(2, learner=DISTRIBUTED_OPTIMIZER, is_slow=True),
    "dp2-overlap": Layout(2, learner=OVERLAP),
    "tp2-sp-forward-top-k": Layout(2, parallel=SP, algorithm=FORWARD),
    "pp2-forward-top-k": Layout(2, parallel={"pp": 2}, algorithm=FORWARD, is_slow=True),
    "cp2-forward-top-k": Layout(2, parallel={"cp": 2}, algorithm=FORWARD),
    "dp2-reverse-top-k": Layout(2, algorithm=REVERSE, is_slow=True),
    "tp2-sp-trees-shared-reverse-top-k": Layout(
        2,
        parallel=SP,
        learner=SHARED | FULL_RECOMPUTE,
        algorithm=REVERSE,
        sampling=TREES,
    ),
    "tp2": Layout(2, parallel={"tp": 2}, is_slow=True),
    "tp2-odd": Layout(2, "odd", parallel={"tp": 2}),
    "tp2-sp": Layout(2, parallel=SP),
    "tp2-sp-qwen3": Layout(2, "qwen3", parallel=SP, is_slow=True),
    "tp2-sp-recompute": Layout(2, parallel=SP, learner=FULL_RECOMPUTE),
    "pp2": Layout(2, parallel={"pp": 2}, is_slow=True),
    "pp2-vpp2": Layout(2, parallel=VPP, is_slow=True),
    "pp2-vpp2-slow-network": Layout(
        2,
        parallel=VPP,
        learner={"transformer": {"overlap_p2p_comm_warmup_flush": True}},
        is_slow_network=True,
    ),
    "pp2-tied": Layout(2, "tied", parallel={"pp": 2}),
    "pp2-uneven": Layout(2, parallel={"pp": 2}, learner=UNEVEN_STAGES),
    "cp2": Layout(2, parallel={"cp": 2}),
    "cp2-qwen3": Layout(2, "qwen3", parallel={"cp": 2}, is_slow=True),
    "cp2-tied": Layout(2, "tied", parallel={"cp": 2}, is_slow=True),
    "cp2-long": Layout(2, parallel={"cp": 2}, learner={"micro_batch_tokens": 20}),
    "cp2-recompute": Layout(2, parallel={"cp": 2}, learner=FULL_RECOMPUTE, is_slow=True),
    "cp2-selective": Layout(2, parallel={"cp": 2}, learner=SELECTIVE_RECOMPUTE, is_slow=True),
    "cp2-overlap": Layout(2, parallel={"cp": 2}, learner=OVERLAP, is_slow=True),
    "cp2-moe": Layout(2, "moe", parallel={"cp": 2}, is_slow=True),
    "ep2-cp2-moe": Layout(2, "moe", parallel={"ep": 2, "cp": 2}),
    "dp2-trees": Layout(2, sampling=TREES, is_slow=True),
    "dp2-trees-shared": Layout(2, learner=SHARED, sampling=TREES, is_slow=True),
    "tp2-sp-trees-shared": Layout(
        2, parallel=SP, learner=SHARED | FULL_RECOMPUTE, sampling=TREES, is_slow=True
    ),
    "pp2-vpp2-trees-shared": Layout(2, parallel=VPP, learner=SHARED, sampling=TREES),
    "dp2-trees-shared-gspo": Layout(
        2, learner=SHARED, algorithm=GSPO, sampling=TREES, is_slow=True
    ),
    "ep2-trees-shared-moe": Layout(2, "moe", parallel={"ep": 2}, learner=SHARED, sampling=TREES),
    "dp2-trees-gspo": Layout(2, algorithm=GSPO, sampling=TREES, is_slow=True),
    "tp2-sp-trees": Layout(2, parallel=SP, sampling=TREES, is_slow=True),
    "pp2-vpp2-trees": Layout(2, parallel=VPP, sampling=TREES, is_slow=True),
    "cp2-trees-gspo": Layout(2, parallel={"cp": 2}, algorithm=GSPO, sampling=TREES),
    "cp2-trees-cispo": Layout(2, parallel={"cp": 2}, algorithm=CISPO, sampling=TREES, is_slow=True),
    "cp2-trees-replay-moe": Layout(2, "moe", parallel={"cp": 2}, algorithm=REPLAY, sampling=TREES),
    "dp2-moe": Layout(2, "moe", is_slow=True),
    "ep2-moe": Layout(2, "moe", parallel={"ep": 2}, is_slow=True),
    "ep2-distopt-moe": Layout(2, "moe", parallel={"ep": 2}, learner=DISTRIBUTED_OPTIMIZER),
    "ep2-overlap-moe": Layout(2, "moe", parallel={"ep": 2}, learner=OVERLAP, is_slow=True),
    "etp2-moe": Layout(2, "moe", parallel={"etp": 2}, is_slow=True),
    "tp2-sp-moe": Layout(2, "moe", parallel=SP),
    "tp2-sp-etp1-moe": Layout(2, "moe", parallel=SP | {"etp": 1}, is_slow=True),
    "tp2-sp-etp1-ep2-moe": Layout(2, "moe", parallel=SP | {"etp": 1, "ep": 2}, is_slow=True),
    "tp2-sp-recompute-moe": Layout(2, "moe", parallel=SP, learner=FULL_RECOMPUTE, is_slow=True),
    "pp2-moe": Layout(2, "moe", parallel={"pp": 2}, is_slow=True),
    "ep2-moe-shared": Layout(2, "moe-shared", parallel={"ep": 2}, is_slow=True),
    "tp2-sp-moe-shared": Layout(2, "moe-shared", parallel=SP, is_slow=True),
    "tp2-sp-ep2-etp1-mixtral": Layout(2, "mixtral", parallel=SP | {"etp": 1, "ep": 2}),
    "dp2-replay-moe": Layout(2, "moe", algorithm=REPLAY, is_slow=True),
    "cp2-replay-moe": Layout(2, "moe", parallel={"cp": 2}, algorithm=REPLAY, is_slow=True),
    "ep2-replay-moe": Layout(2, "moe", parallel={"ep": 2}, algorithm=REPLAY, is_slow=True),
    "pp2-vpp2-replay-moe": Layout(2, "moe", parallel=VPP, algorithm=REPLAY, is_slow=True),
    "pp2-recompute-replay-moe": Layout(
        2, "moe", parallel={"pp": 2}, learner=FULL_RECOMPUTE, algorithm=REPLAY, is_slow=True
    ),
    "pp2-vpp2-moe-recompute-replay-moe": Layout(
        2, "moe", parallel=VPP, learner=MOE_RECOMPUTE, algorithm=REPLAY
    ),
    "tp2-sp-replay-moe": Layout(2, "moe", parallel=SP, algorithm=REPLAY, is_slow=True),
    "tp2-sp-recompute-replay-moe": Layout(
        2, "moe", parallel=SP, learner=FULL_RECOMPUTE, algorithm=REPLAY
    ),
    "tp2-sp-etp1-ep2-replay-moe": Layout(
        2, "moe", parallel=SP | {"etp": 1, "ep": 2}, algorithm=REPLAY, is_slow=True
    ),
    "tp2-sp-mistral": Layout(2, "mistral", parallel=SP, is_slow=True),
    "pp2-mistral": Layout(2, "mistral", parallel={"pp": 2}, is_slow=True),
    "cp2-mistral": Layout(2, "mistral", parallel={"cp": 2}),
    "tp2-sp-ministral3": Layout(2, "ministral3", parallel=SP, is_slow=True),
    "pp2-cp2-ministral3": Layout(4, "ministral3", parallel={"pp": 2, "cp": 2}, is_slow=True),
    "tp2-sp-olmo2": Layout(2, "olmo2", parallel=SP),
    "cp2-ernie": Layout(2, "ernie", parallel={"cp": 2}, is_slow=True),
    "tp2-sp-glm": Layout(2, "glm", parallel=SP, is_slow=True),
    "ep2-glm": Layout(2, "glm", parallel={"ep": 2}, is_slow=True),
    "pp2-vpp2-cp2-glm": Layout(4, "glm", parallel=VPP | {"cp": 2}, is_slow=True),
    "tp2-sp-deepseek": Layout(2, "deepseek", parallel=SP, is_slow=True),
    "tp2-sp-moonlight": Layout(2, "moonlight", parallel=SP, is_slow=True),
    "pp2-cp2-ep2-deepseek": Layout(
        4, "deepseek", parallel={"pp": 2, "cp": 2, "ep": 2}, is_slow=True
    ),
    "tp2-sp-deepseek2": Layout(2, "deepseek2", parallel=SP, is_slow=True),
    "pp2-cp2-ep2-deepseek2": Layout(
        4, "deepseek2", parallel={"pp": 2, "cp": 2, "ep": 2}, is_slow=True
    ),
    "tp2-sp-ep2-etp1-deepseek2-lite": Layout(
        2, "deepseek2-lite", parallel=SP | {"ep": 2, "etp": 1}, is_slow=True
    ),
    "tp2-sp-qwen3-next": Layout(2, "qwen3-next", parallel=SP, is_slow=True),
    "pp2-vpp2-ep2-qwen3-next": Layout(4, "qwen3-next", parallel=VPP | {"ep": 2}, is_slow=True),
    "tp2-sp-nemotron-h": Layout(2, "nemotron-h", parallel=SP, is_slow=True),
    "pp2-vpp2-nemotron-h": Layout(2, "nemotron-h", parallel=VPP, is_slow=True),
    "tp2-sp-pp2-recompute-nemotron-h": Layout(
        4, "nemotron-h", parallel=SP | {"pp": 2}, learner=FULL_RECOMPUTE, is_slow=True
    ),
    "tp2-pp2-vpp2-qwen35": Layout(4, "qwen35", parallel=VPP | {"tp": 2}, is_slow=True),
    "tp2-sp-recompute-qwen35": Layout(
        2, "qwen35", parallel=SP, learner=FULL_RECOMPUTE, is_slow=True
    ),
    "tp2-sp-ep2-etp1-qwen35-moe": Layout(
        2, "qwen35-moe", parallel=SP | {"ep": 2, "etp": 1}, is_slow=True
    ),
    "pp2-vpp2-ep2-qwen35-moe": Layout(4, "qwen35-moe", parallel=VPP | {"ep": 2}, is_slow=True),
    "pp2-vpp2-replay-glm": Layout(2, "glm", parallel=VPP, algorithm=REPLAY, is_slow=True),
    "tp2-sp-recompute-replay-deepseek2": Layout(
        2, "deepseek2", parallel=SP, learner=FULL_RECOMPUTE, algorithm=REPLAY, is_slow=True
    ),
    "tp2-sp-etp1-gpt-oss": Layout(2, "gpt-oss", parallel=SP | {"etp": 1}, is_slow=True),
    "cp2-gpt-oss": Layout(2, "gpt-oss", parallel={"cp": 2}, is_slow=True),
    "pp2-vpp2-cp2-ep2-gpt-oss": Layout(
        4, "gpt-oss", parallel=VPP | {"cp": 2, "ep": 2}, is_slow=True
    ),
    "tp2-sp-gemma2": Layout(2, "gemma2", parallel=SP, is_slow=True),
    "pp2-cp2-gemma2": Layout(4, "gemma2", parallel={"pp": 2, "cp": 2}, is_slow=True),
    "tp2-gemma3-tower": Layout(2, "gemma3-tower", parallel={"tp": 2}),
    "tp2-sp-ministral3-tower": Layout(2, "ministral3-tower", parallel=SP, is_slow=True),
    "tp2-sp-gemma3": Layout(2, "gemma3", parallel=SP, is_slow=True),
    "tp2-sp-recompute-gemma3": Layout(
        2, "gemma3", parallel=SP, learner=FULL_RECOMPUTE, is_slow=True
    ),
    "pp2-vpp2-cp2-gemma3-tower": Layout(4, "gemma3-tower", parallel=VPP | {"cp": 2}, is_slow=True),
    "pp2-cp2-mistral-tower": Layout(4, "mistral-tower", parallel={"pp": 2, "cp": 2}, is_slow=True),
    "pp2-vpp2-cp2-gemma3": Layout(4, "gemma3", parallel=VPP | {"cp": 2}, is_slow=True),
    "pp2-cp2-olmo2": Layout(4, "olmo2", parallel={"pp": 2, "cp": 2}, is_slow=True),
    "tp2-sp-ep2-olmoe": Layout(4, "olmoe", parallel=SP | {"ep": 2}, is_slow=True),
    "pp2-cp2-olmoe": Layout(4, "olmoe", parallel={"pp": 2, "cp": 2}, is_slow=True),
    "dp4": Layout(4, is_slow=True),
    "dp4-distopt": Layout(4, learner=DISTRIBUTED_OPTIMIZER, is_slow=True),
    "dp4-few": Layout(4, algorithm=FEW),
    "dp2-tp2-sp-distopt": Layout(4, parallel=SP, learner=DISTRIBUTED_OPTIMIZER, is_slow=True),
    "dp2-tp2-qwen3": Layout(4, "qwen3", parallel={"tp": 2}, is_slow=True),
    "dp2-pp2-overlap": Layout(4, parallel={"pp": 2}, learner=OVERLAP),
    "dp2-pp2-tied": Layout(4, "tied", parallel={"pp": 2}, is_slow=True),
    "dp2-cp2-distopt": Layout(4, parallel={"cp": 2}, learner=DISTRIBUTED_OPTIMIZER, is_slow=True),
    "dp2-cp2-trees": Layout(4, parallel={"cp": 2}, sampling=TREES),
    "dp2-cp2-few": Layout(4, parallel={"cp": 2}, algorithm=FEW, is_slow=True),
    "cp4": Layout(4, parallel={"cp": 4}),
    "tp2-cp2": Layout(4, parallel={"tp": 2, "cp": 2}, is_slow=True),
    "tp2-sp-cp2-recompute": Layout(
        4, parallel=SP | {"cp": 2}, learner=FULL_RECOMPUTE, is_slow=True
    ),
    "tp2-sp-cp2-tied": Layout(4, "tied", parallel=SP | {"cp": 2}, is_slow=True),
    "pp2-cp2": Layout(4, parallel={"pp": 2, "cp": 2}, is_slow=True),
    "pp2-vpp2-cp2-qwen3": Layout(4, "qwen3", parallel=VPP | {"cp": 2}, is_slow=True),
    "tp2-sp-pp2-vpp2": Layout(4, parallel=SP | VPP, is_slow=True),
    "tp2-pp2-tied": Layout(4, "tied", parallel={"tp": 2, "pp": 2}, is_slow=True),
    "dp4-ep2-distopt-moe": Layout(
        4, "moe", parallel={"ep": 2}, learner=DISTRIBUTED_OPTIMIZER, is_slow=True
    ),
    "tp2-sp-ep2-moe": Layout(4, "moe", parallel=SP | {"ep": 2}, is_slow=True),
    "tp2-sp-etp1-ep4-moe": Layout(4, "moe", parallel=SP | {"ep": 4, "etp": 1}, is_slow=True),
    "tp2-sp-cp2-etp1-ep4-moe": Layout(
        4, "moe", parallel=SP | {"cp": 2, "ep": 4, "etp": 1}, is_slow=True
    ),
    "pp2-ep2-moe": Layout(4, "moe", parallel={"ep": 2, "pp": 2}, is_slow=True),
    "pp2-vpp2-ep2-moe": Layout(4, "moe", parallel=VPP | {"ep": 2}),
    "pp2-cp2-ep2-moe": Layout(4, "moe", parallel={"ep": 2, "pp": 2, "cp": 2}, is_slow=True),
    # All kinds at once; there is no room for replicas.
    "tp2-sp-pp2-cp2": Layout(8, parallel=SP | {"pp": 2, "cp": 2}, is_slow=True),
    "tp2-sp-pp2-cp2-ep2-moe": Layout(
        8, "moe", parallel=SP | {"pp": 2, "cp": 2, "ep": 2}, is_slow=True
    ),
    "tp2-sp-pp2-vpp2-cp2-ep2-moe": Layout(8, "moe", parallel=SP | VPP | {"cp": 2, "ep": 2}),
    "tp2-sp-pp2-vpp2-cp2-etp1-ep4-moe": Layout(
        8, "moe", parallel=SP | VPP | {"cp": 2, "ep": 4, "etp": 1}, is_slow=True
    ),
    "tp2-sp-pp2-vpp2-cp2-ep2-replay-moe": Layout(
        8, "moe", parallel=SP | VPP | {"cp": 2, "ep": 2}, algorithm=REPLAY, is_slow=True
    ),
    "dp2-tp2-sp-cp2-distopt": Layout(
        8, parallel=SP | {"cp": 2}, learner=DISTRIBUTED_OPTIMIZER, is_slow=True
    ),
    "dp2-tp2-sp-pp2-vpp2-cp2-ep2-overlap-moe": Layout(
        16, "moe", parallel=SP | VPP | {"cp": 2, "ep": 2}, learner=OVERLAP, is_slow=True
    ),
    "dp2-tp2-sp-pp2-vpp2-cp2-qwen3": Layout(
        16, "qwen3", parallel=SP | VPP | {"cp": 2}, is_slow=True
    ),
}
# A learning rate with which the second step cannot be finite.
OVERFLOW = Layout(1, algorithm={"learning_rate": 1e30})
# A batch whose episodes are all truncated and filtered: nothing is trained.
NOTHING_TRAINED = Layout(1, algorithm={"leave_out_truncated": True, "aggregation": "sequence_mean"})
# The functions of GRPO by modules of one's own.
OWN = Layout(
    1,
    algorithm=TWO_MINI_BATCHES
    | {name: f"support.fakes.own_grpo:{name}" for name in ("loss", "weight", "advantage", "reward")}
    | {"weight_args": {"cap": 1.2}},
)
EXTRAORDINARY = {
    "own": OWN,
    "overflow": OVERFLOW,
    "nothing-trained": NOTHING_TRAINED,
    "disturbed-routers": LAYOUTS["one-replay-moe"],
}


def layouts_of(world_size: int) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if layout.world_size == world_size]


def each_layout_of(world_size: int) -> list[object]:
    """Parameters of a test."""
    slow = [name for name, layout in LAYOUTS.items() if layout.is_slow]
    return each_job(layouts_of(world_size), slow)


def config_of(job: str, folder: Path) -> Config:
    """The settings of a layout; `LAYOUT@bfloat16` in another precision."""
    name, _, dtype = job.partition("@")
    layout = (LAYOUTS | EXTRAORDINARY)[name]
    tables = {"algorithm": layout.algorithm, "learner": layout.learner, "sampling": layout.sampling}
    if "kl" in layout.algorithm:
        server = {"base_url": "http://127.0.0.1:9/v1", "model": "teacher"}
        tables["reference"] = {"server": server, "top_k": TOP_K}
        tables["sampling"] = layout.sampling | {"temperature": 1.0}
    sizes = {"world_size": layout.world_size, "parallel": layout.parallel}
    return settings_of(folder / layout.model, tables, {"learner": sizes}, dtype=dtype or "float32")


def batches(config: Config) -> list[Batch]:
    algorithm = config.algorithm
    found = [
        make_batch(
            step,
            num_groups=algorithm.groups_per_step,
            group_size=algorithm.group_size,
            vocab_size=VOCAB,
            max_tokens=config.sampling.max_episode_tokens,
        )
        for step in range(STEPS)
    ]
    if config.sampling.max_total_tokens:
        longest = config.sampling.max_episode_tokens
        found = [with_branches(one, vocab_size=VOCAB, max_tokens=longest) for one in found]
    if config.reference is not None:
        found = [with_reference(one) for one in found]
    return found if algorithm.router_replay == "off" else [with_experts(one) for one in found]


def with_reference(batch: Batch) -> Batch:
    """Any likely tokens, with probabilities that leave a rest."""
    random = np.random.default_rng(batch.step)

    def known(trajectory: Trajectory) -> ReferenceLogprobs:
        size = trajectory.num_sampled_tokens
        ids = random.random((size, VOCAB)).argsort(axis=-1)[:, :TOP_K].astype(np.uint32)
        shares = random.dirichlet(np.ones(TOP_K + 1), size)[:, :TOP_K]
        return ReferenceLogprobs(
            np.full(size, -1.0, dtype=np.float32), ids, np.log(shares).astype(np.float32)
        )

    changed = [dataclasses.replace(t, reference=known(t)) for t in batch.trajectories]
    return dataclasses.replace(batch, trajectories=tuple(changed))


def with_experts(batch: Batch) -> Batch:
    """Tokens that go anywhere, whatever the routers say; of some nothing is recorded."""
    random = np.random.default_rng(batch.step)

    def routed(trajectory: Trajectory) -> Trajectory:
        if random.random() < 0.2:
            return trajectory
        shape = (len(trajectory.token_ids), NUM_LAYERS, NUM_EXPERTS)
        ids = random.random(shape).argsort(axis=-1)[..., :EXPERTS_PER_TOKEN].astype(np.uint8)
        ids[random.random(len(ids)) < 0.1] = 255
        for part in trajectory.sequences():
            ids[part.tokens.stop - 1] = 255
        return dataclasses.replace(trajectory, routed_experts=RoutedExperts(ids, NUM_EXPERTS))

    return dataclasses.replace(batch, trajectories=tuple(map(routed, batch.trajectories)))


def probe(config: Config) -> list[np.ndarray]:
    first = [(t, t.sequences()[0]) for t in batches(config)[0].trajectories[:6]]
    return [trajectory.token_ids[part.tokens] for trajectory, part in first]
