"""Parallel layouts that must all train alike, and what they train.

A name says the sizes of a layout, what else differs, and the model where it is not the Llama.
"""

import copy
import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from slipstream.core.environment_rules import environment_rules
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.settings.config import Config
from slipstream.core.types import ReferenceLogprobs, RoutedExperts, Trajectory
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.protocol.codec import pack_tokens

from support.fakes.fake_controller import make_batch, with_branches
from support.fakes.parity_models import (
    EXPERTS_PER_TOKEN,
    NUM_EXPERTS,
    NUM_LAYERS,
    VOCAB,
)
from support.ranks.rank_pool import each_job
from support.ranks.rank_program import STEPS, settings_of
from support.references.plain_algorithm import TOP_ENTROPY


@dataclass(frozen=True)
class Layout:
    """How many ranks, which model, and what differs from `SETTINGS`."""

    world_size: int
    model: str = "llama"
    parallel: dict = field(default_factory=dict)
    learner: dict = field(default_factory=dict)
    algorithm: dict = field(default_factory=dict)
    extensions: dict = field(default_factory=dict)
    # The table `reference` of a model that reads other prompts.
    teacher: dict = field(default_factory=dict)
    # Episodes of several branches, with as many tokens together as `TREES` says.
    sampling: dict = field(default_factory=dict)
    # Pipeline stages send what they hand on only a moment after they were asked to.
    is_slow_network: bool = False
    # Attention splits, normalises and rotates its heads as on a GPU.
    has_fused_heads: bool = False

    @property
    def reference(self) -> str:
        """The layout of one rank that does the same."""
        return next(
            name
            for name, layout in LAYOUTS.items()
            if layout.world_size == 1 and layout._trained == self._trained
        )

    @property
    def _trained(self) -> tuple[object, ...]:
        """What differs between references."""
        optimizer = self.learner.get("optimizer")
        return (
            self.model,
            self.algorithm,
            self.sampling,
            self.extensions,
            self.teacher,
            self.router_losses,
            optimizer,
        )

    @property
    def router_losses(self) -> dict[str, float]:
        """The coefficients of the losses of routers, by the names of Megatron."""
        settings = self.learner.get("transformer", {})
        return {
            name: value
            for name, value in settings.items()
            if name.endswith("_loss_coeff")
        }


# The second step has moments, and ratios to the policy before it.
PARITY_STEPS = 2
SLOW_NETWORK = "slow-network"
SEQUENCE_PARALLEL = "sp"
FUSED_HEADS = "fused"
SP = {"tp": 2}
VPP = {"pp": 2, "vpp": 2}
DISTRIBUTED_OPTIMIZER = {"ddp": {"use_distributed_optimizer": True}}
OVERLAP = {
    "ddp": {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 20000,
    }
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
# Numbers that are summed over sequences, or over all tokens of a batch, wherever they lie.
TOP_ENTROPY_LOSS = {
    "mini_batches": 2,
    "loss": TOP_ENTROPY,
    "loss_args": {"share": 0.3},
}
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
# Losses of routers. The one that balances experts is a product of means over a micro batch, so that
# it depends on how a step is cut into them.
BALANCED = {"transformer": {"moe_aux_loss_coeff": 0.5}, "micro_batch_tokens": 4096}
Z_LOSS = {"transformer": {"moe_z_loss_coeff": 0.05}}
# Likely tokens of a reference behind a server.
TOP_K = 3
FORWARD = {"kl": {"coefficient": 0.5, "estimator": "forward_top_k"}}
REVERSE = {"mini_batches": 2, "kl": {"coefficient": 0.5, "estimator": "reverse_top_k"}}
TREES = {"max_total_tokens": 120}
# Tokens were drawn from parts of the vocabulary.
CUT = {"top_p": 0.9, "top_k": 5}
CUT_ALGORITHM = {"mini_batches": 2, "entropy_coefficient": 0.1}

# Factors of engine and lag of which some are capped or outside a band.
SPLIT = {
    "mini_batches": 2,
    "weight": "split",
    "weight_args": {
        "engine_cap": 1.2,
        "engine_token_band": [0.3, 3.0],
        "staleness_cap": 1.0,
        "staleness_token_band": [0.99, 1.01],
        "staleness_sequence_band": [0.999, 1.001],
    },
}

MUON = {"optimizer": {"adam_eps": 1e-3, "optimizer": "muon"}}
OTHER_MUON = {
    "optimizer": MUON["optimizer"]
    | {
        "muon_momentum": 0.8,
        "muon_nesterov": True,
        "muon_split_qkv": False,
        "muon_scale_mode": "unit_rms_norm",
        "muon_coefficient_type": "simple",
        "muon_num_ns_steps": 6,
        "muon_extra_scale_factor": 0.5,
        "muon_tp_mode": "distributed",
    }
}
OFFLOAD = {"offload": {"parameters": True, "gradients": True, "optimizer": True}}

# Every second group is of an environment that differs.
OTHER = "other"
BY_ENVIRONMENT = {
    "extensions": {
        "by_environment": {
            "environments": {
                OTHER: {
                    "loss_weight": 2.5,
                    "temperature": 1.3,
                    "advantage": "reinforce_pp",
                    "loss": "cispo",
                    "loss_args": {"clip_low": 0.01, "clip_high": 0.02},
                },
            },
        },
    },
    "algorithm": {
        "groups_per_step": 4,
        "mini_batches": 2,
        "aggregation": "sequence_mean",
    },
}

# A loss that asks for numbers of all its tokens, beside one that has a mean of each sequence.
OWN_LOSSES = {
    "extensions": {
        "by_environment": {
            "environments": {
                OTHER: {
                    "loss": "gspo",
                    "loss_args": {"clip_low": 3e-4, "clip_high": 4e-4},
                },
            },
        },
    },
    "algorithm": TOP_ENTROPY_LOSS | {"groups_per_step": 4},
}

DIVERGENT = {
    "extensions": {
        "by_environment": {
            "environments": {
                OTHER: {
                    "kl_coefficient": 3.0,
                },
            },
        },
    },
    "algorithm": REVERSE,
}

# The policy itself, or what it was before the first step, reads other prompts.
TAUGHT = {
    "algorithm": REVERSE,
    "teacher": {"policy": True, "top_k": TOP_K},
}
TAUGHT_BY_OTHER = {
    "algorithm": {"kl": {"coefficient": 0.5, "placement": "reward", "estimator": "k1"}},
    "teacher": {"refresh_every_steps": 0},
}

# The groups are of environments with teachers of each kind, and of one that has none by name.
SERVED = "served"
MODEL = "model"
POLICY = "policy"
UNNAMED = "unnamed"
TEACHERS = {
    "algorithm": REVERSE | {"groups_per_step": 4},
    "teacher": {
        "top_k": TOP_K,
        "teachers": {
            "behind": {
                "environments": [SERVED],
                "server": {"base_url": "http://127.0.0.1:9/v1", "model": "teacher"},
            },
            # A folder beside that of the policy.
            "here": {"environments": [MODEL], "path": "mistral"},
            "itself": {"environments": [POLICY], "policy": True},
        },
    },
    "sampling": {"temperature": 1.0},
}

# Every shared prefix is computed once, however short.
SHARED = {"shared_prefix_tokens": 1}

# Words of a layout's name: the settings that each changes, by table.
WORDS = {
    # The folder is written when the memory of its tensors could be given away already.
    "offload": {"learner": OFFLOAD},
    "distopt": {"learner": DISTRIBUTED_OPTIMIZER},
    "overlap": {"learner": OVERLAP},
    # Parameters are each gathered by itself.
    "tiny-buckets": {"learner": {"ddp": OVERLAP["ddp"] | {"bucket_size": 1}}},
    "muon": {"learner": MUON},
    "other-muon": {"learner": OTHER_MUON},
    "moe-recompute": {"learner": MOE_RECOMPUTE},
    "recompute": {"learner": FULL_RECOMPUTE},
    "selective": {"learner": SELECTIVE_RECOMPUTE},
    "uneven": {"learner": UNEVEN_STAGES},
    "long": {"learner": {"micro_batch_tokens": 20}},
    "balanced": {"learner": BALANCED},
    "z-loss": {"learner": Z_LOSS},
    SLOW_NETWORK: {"learner": {"transformer": {"overlap_p2p_comm_warmup_flush": True}}},
    "mini-batches": {"algorithm": TWO_MINI_BATCHES},
    "few": {"algorithm": FEW},
    "gspo": {"algorithm": GSPO},
    "cispo": {"algorithm": CISPO},
    "top-entropy": {"algorithm": TOP_ENTROPY_LOSS},
    "divergent": DIVERGENT,
    "by-environment": BY_ENVIRONMENT,
    "taught": TAUGHT,
    "taught-by-other": TAUGHT_BY_OTHER,
    "teachers": TEACHERS,
    "own-losses": OWN_LOSSES,
    "replay": {"algorithm": REPLAY},
    "forward-top-k": {"algorithm": FORWARD},
    "reverse-top-k": {"algorithm": REVERSE},
    "trees-shared": {"sampling": TREES, "learner": SHARED},
    "trees": {"sampling": TREES},
    "cut": {"sampling": CUT, "algorithm": CUT_ALGORITHM},
    "split": {"algorithm": SPLIT},
    SEQUENCE_PARALLEL: {},
    FUSED_HEADS: {},
}
SIZE = re.compile(r"(?:^|-)(dp|tp|pp|vpp|cp|ep|etp)(\d+)")
# The first layout of one rank with the same model, algorithm and sampling is the reference.
NAMES = """
    one one-mini-batches one-few one-gspo one-cispo one-tied one-offload-odd one-moe one-replay-moe
    one-trees dp2-overlap tp2-sp pp2-tied cp2 ep2-distopt-moe dp4-few one-balanced-moe
    tp2-sp-balanced-moe cp2-balanced-moe one-z-loss-moe cp2-z-loss-moe one-muon tp2-sp-muon
    one-cut tp2-sp-cut cp2-cut one-top-entropy cp2-top-entropy
    one-by-environment cp2-by-environment tp2-sp-by-environment
    one-split tp2-sp-split cp2-split dp2-overlap-split pp2-vpp2-split
    one-teachers dp2-teachers
"""
# One kind of model, algorithm or layout each.
LONG = """
    one-qwen3 one-qwen2 one-llama3 one-moe-softmax one-mistral
    one-ministral3 one-gemma3 one-glm one-deepseek
    one-moonlight one-qwen3-next one-qwen35
    one-kimi one-kimi25 tp2-sp-kimi25 cp2-kimi25 ep2-kimi25 one-replay-kimi25
    one-mimo one-glm-lite one-minimax
    one-smollm3 one-fused-qwen3 one-fused-trees-shared one-fused-gemma3
    cp2-fused-qwen3 tp2-sp-recompute-fused-qwen3 pp2-vpp2-fused one-mini-batches-fused-qwen3
    dp2-tiny-buckets-mini-batches-fused-qwen3
    one-gpt-oss one-olmo2 one-replay-glm one-replay-deepseek one-forward-top-k
    one-trees-reverse-top-k one-trees-shared one-trees-gspo one-trees-replay-moe tp2-sp-z-loss-moe
    dp2 tp2-sp-forward-top-k cp2-forward-top-k
    tp2-sp-recompute-trees-shared-reverse-top-k tp2-odd tp2-sp-recompute
    pp2-vpp2-slow-network pp2-uneven cp2-long ep2-cp2-moe pp2-vpp2-trees-shared
    ep2-trees-shared-moe cp2-trees-gspo cp2-trees-replay-moe tp2-sp-moe
    pp2-vpp2-moe-recompute-replay-moe tp2-sp-recompute-replay-moe
    cp2-mistral tp2-sp-olmo2 tp2-gemma3 ep2-glm-lite tp2-sp-minimax tp2-sp-smollm3
    cp2-qwen3-next tp2-sp-cp2-qwen35 one-trees-qwen35 cp2-trees-qwen35
    one-other-muon tp2-other-muon dp2-muon cp2-muon one-muon-moe tp2-sp-muon-moe
    dp2-pp2-overlap dp2-cp2-trees cp4 pp2-vpp2-ep2-moe
    tp2-sp-pp2-vpp2-cp2-ep2-moe
    pp2-vpp2-cut one-trees-cut tp2-trees-shared-cut cp2-trees-cut
    dp2-top-entropy pp2-vpp2-top-entropy tp2-sp-top-entropy cp2-trees-top-entropy
    one-trees-top-entropy
    dp2-by-environment pp2-vpp2-by-environment one-trees-by-environment cp2-trees-by-environment
    one-by-environment-cut-split cp2-by-environment-cut-split tp2-sp-by-environment-cut-split
    one-by-environment-trees-shared one-own-losses cp2-own-losses dp2-own-losses
    pp2-vpp2-own-losses tp2-sp-trees-own-losses one-trees-own-losses one-divergent cp2-divergent
    one-trees-divergent tp2-sp-trees-divergent
    one-taught cp2-taught dp2-taught tp2-sp-taught pp2-vpp2-taught one-taught-by-other-cut
    tp2-sp-taught-by-other-cut one-taught-by-environment one-taught-by-other cp2-taught-by-other
    one-taught-moe ep2-taught-moe one-taught-split
    cp2-teachers tp2-sp-teachers pp2-vpp2-teachers one-trees-teachers cp2-trees-teachers
    one-teachers-split
    one-trees-split one-trees-shared-split cp2-trees-split tp2-sp-offload-split
    one-replay-split-moe ep2-cp2-replay-split-moe dp2-distopt-split one-cut-split tp2-sp-cut-split
"""
# What others show too, so that it need not be tried at every change. 16 ranks have all kinds at
# once, with room for replicas.
SLOW = """
    one-qwen35-moe one-replay-moe-softmax one-replay-qwen35-moe
    one-replay-gpt-oss one-reverse-top-k one-trees-cispo one-trees-moe
    dp2-distopt pp2-forward-top-k dp2-reverse-top-k tp2 tp2-sp-qwen3 pp2 pp2-vpp2 cp2-qwen3
    cp2-tied cp2-recompute cp2-selective cp2-overlap cp2-moe dp2-trees dp2-trees-shared
    tp2-sp-recompute-trees-shared dp2-trees-shared-gspo dp2-trees-gspo tp2-sp-trees pp2-vpp2-trees
    cp2-trees-cispo dp2-moe ep2-moe ep2-overlap-moe etp2-moe tp2-sp-etp1-moe tp2-sp-etp1-ep2-moe
    tp2-sp-recompute-moe pp2-moe dp2-replay-moe cp2-replay-moe
    ep2-replay-moe pp2-vpp2-replay-moe pp2-recompute-replay-moe tp2-sp-replay-moe
    tp2-sp-etp1-ep2-replay-moe tp2-sp-mistral pp2-mistral tp2-sp-ministral3 tp2-sp-glm
    ep2-glm tp2-sp-deepseek tp2-sp-ep2-etp1-moonlight
    tp2-sp-qwen3-next tp2-sp-recompute-qwen35
    tp2-sp-ep2-etp1-qwen35-moe pp2-vpp2-replay-glm tp2-sp-recompute-replay-deepseek
    tp2-sp-kimi pp2-vpp2-kimi25 tp2-sp-ep2-etp1-replay-kimi25
    tp2-sp-ep2-etp1-glm-lite ep2-minimax pp2-vpp2-cp2-minimax pp2-vpp2-cp2-smollm3
    tp2-sp-etp1-gpt-oss cp2-gpt-oss tp2-sp-gemma3
    tp2-sp-recompute-gemma3
    pp2-cp2-ministral3 pp2-vpp2-cp2-glm pp2-cp2-ep2-deepseek
    pp2-vpp2-ep2-qwen3-next tp2-pp2-vpp2-qwen35
    pp2-vpp2-ep2-qwen35-moe pp2-vpp2-cp2-ep2-gpt-oss
    pp2-vpp2-cp2-gemma3 pp2-cp2-olmo2 dp4
    dp4-distopt dp2-tp2-sp-distopt dp2-tp2-qwen3 dp2-pp2-tied dp2-cp2-distopt dp2-cp2-few tp2-cp2
    tp2-sp-cp2-recompute tp2-sp-cp2-tied pp2-cp2 pp2-vpp2-cp2-qwen3 tp2-sp-pp2-vpp2 tp2-pp2-tied
    dp4-ep2-distopt-moe tp2-sp-ep2-moe tp2-sp-etp1-ep4-moe tp2-sp-cp2-etp1-ep4-moe pp2-ep2-moe
    pp2-cp2-ep2-moe
    pp2-balanced-moe tp2-sp-cp2-balanced-moe tp2-sp-ep2-etp1-balanced-moe ep2-z-loss-moe
    dp2-tp2-sp-z-loss-moe tp2-sp-cp2-etp1-ep4-z-loss-moe
    cp2-qwen35 cp2-recompute-qwen35 pp2-cp2-qwen3-next pp2-vpp2-cp2-qwen35
    dp2-tp2-sp-cp2-ep2-qwen35-moe cp4-qwen3-next cp2-muon-qwen3-next
    tp2-muon pp2-muon ep2-muon-moe one-muon-qwen3-next tp2-sp-muon-qwen3-next
    tp2-sp-pp2-cp2 tp2-sp-pp2-cp2-ep2-moe tp2-sp-pp2-vpp2-cp2-etp1-ep4-moe
    tp2-sp-pp2-vpp2-cp2-ep2-replay-moe dp2-tp2-sp-cp2-distopt
    dp2-tp2-sp-pp2-vpp2-cp2-ep2-overlap-moe dp2-tp2-sp-pp2-vpp2-cp2-qwen3
"""


def layout_of(name: str) -> Layout:
    """Returns the layout with this name; what is no word and no size in it is the model."""
    tables: dict[str, dict] = defaultdict(dict)
    rest = name.removeprefix("one")
    for word in sorted(WORDS, key=len, reverse=True):
        rest, number = re.subn(rf"(^|-){word}(?=-|$)", "", rest)
        for table, changes in WORDS[word].items() if number else ():
            tables[table] |= changes
    sizes = {axis: int(n) for axis, n in re.findall(SIZE, rest)}
    model = re.sub(SIZE, "", rest).removeprefix("-") or "llama"
    tp, pp, cp = (sizes.get(axis, 1) for axis in ("tp", "pp", "cp"))
    dense = sizes.pop("dp", 1) * tp * pp * cp
    if tp > 1 and f"-{SEQUENCE_PARALLEL}" not in name:
        transformer = tables["learner"].get("transformer", {})
        tables["learner"]["transformer"] = transformer | {"sequence_parallel": False}
    world_size = max(dense, pp * sizes.get("ep", 1) * sizes.get("etp", tp))
    tables["parallel"] |= sizes
    flags = {
        "is_slow_network": SLOW_NETWORK in name,
        "has_fused_heads": f"-{FUSED_HEADS}" in name,
    }
    return Layout(world_size, model, **flags, **tables)


LAYOUTS = {name: layout_of(name) for name in (NAMES + LONG + SLOW).split()}
# A learning rate with which the second step cannot be finite.
OVERFLOW = Layout(1, algorithm={"learning_rate": 1e30})
# A batch whose episodes are all truncated and filtered: nothing is trained.
NOTHING_TRAINED = Layout(
    1, algorithm={"leave_out_truncated": True, "aggregation": "sequence_mean"}
)
# The functions of GRPO by modules of one's own.
OWN = Layout(
    1,
    algorithm=TWO_MINI_BATCHES
    | {
        name: f"support.fakes.own_grpo:{name}"
        for name in ("loss", "weight", "advantage", "reward")
    }
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


def each_layout_of(*world_sizes: int) -> list[object]:
    """Parameters of a test."""
    names = [name for n in world_sizes for name in layouts_of(n)]
    return each_job(names, SLOW.split(), LONG.split())


def config_of(job: str, folder: Path, **changes: dict) -> Config:
    """The settings of a layout; `LAYOUT@bfloat16` in another precision. `changes` are by table."""
    name, _, dtype = job.partition("@")
    layout = (LAYOUTS | EXTRAORDINARY)[name]
    tables = {
        "algorithm": layout.algorithm,
        "learner": layout.learner,
        "sampling": layout.sampling,
    }
    tables["extensions"] = layout.extensions
    if layout.teacher:
        tables["reference"] = in_folders(layout.teacher, folder)
    elif "kl" in layout.algorithm:
        server = {"base_url": "http://127.0.0.1:9/v1", "model": "teacher"}
        tables["reference"] = {"server": server, "top_k": TOP_K}
        tables["sampling"] = layout.sampling | {"temperature": 1.0}
    sizes = {"world_size": layout.world_size, "parallel": layout.parallel}
    settings = {"learner": sizes}
    return settings_of(
        folder / layout.model, tables, settings, changes, dtype=dtype or "float32"
    )


def in_folders(reference: dict, folder: Path) -> dict:
    """The table of a reference, with the paths of its teachers in `folder`."""
    reference = copy.deepcopy(reference)
    for teacher in reference.get("teachers", {}).values():
        if "path" in teacher:
            teacher["path"] = str(folder / teacher["path"])
    return reference


def batches(config: Config) -> list[Batch]:
    algorithm = config.algorithm
    batches = [
        make_batch(
            step,
            num_groups=algorithm.groups_per_step,
            group_size=algorithm.group_size,
            vocab_size=VOCAB,
            max_tokens=config.sampling.max_episode_tokens,
        )
        for step in range(STEPS)
    ]
    if environment_rules(config):
        batches[:] = map(with_environments, batches)
    if config.sampling.max_total_tokens:
        longest = config.sampling.max_episode_tokens
        batches = [
            with_branches(batch, vocab_size=VOCAB, max_tokens=longest)
            for batch in batches
        ]
    if config.replays_sampling:
        batches[:] = map(with_kept_tokens, batches)
    if config.reference is not None and config.reference.server is not None:
        batches = [with_reference(batch) for batch in batches]
    return (
        batches
        if algorithm.router_replay == "off"
        else [with_experts(batch) for batch in batches]
    )


def batches_of(job: str, config: Config) -> list[Batch]:
    """The batches of a layout, with other prompts for its teacher if it has one."""
    layout = (LAYOUTS | EXTRAORDINARY)[job.partition("@")[0]]
    if not layout.teacher:
        return batches(config)
    longest = config.sampling.max_episode_tokens
    taught = [with_teacher(batch, max_tokens=longest) for batch in batches(config)]
    if config.reference is not None and config.reference.teachers:
        taught[:] = map(with_teachers, taught)
    return taught


def with_environments(batch: Batch) -> Batch:
    """Every second group is one of the environment `OTHER`."""
    group_ids = list(dict.fromkeys(batch.group_ids))
    others = group_ids[1::2]
    trajectories = [
        dataclasses.replace(trajectory, environment=OTHER)
        if trajectory.group_id in others
        else trajectory
        for trajectory in batch.trajectories
    ]
    return dataclasses.replace(batch, trajectories=tuple(trajectories))


def with_teachers(batch: Batch) -> Batch:
    """Each group is of another environment, and those of `SERVED` were scored by a server."""
    scored = with_reference(batch)
    names = itertools.cycle((UNNAMED, SERVED, MODEL, POLICY))
    environments = dict(zip(dict.fromkeys(batch.group_ids), names, strict=False))
    trajectories = []
    for plain, answered in zip(batch.trajectories, scored.trajectories, strict=True):
        environment = environments[plain.group_id]
        chosen = answered if environment == SERVED else plain
        trajectories.append(dataclasses.replace(chosen, environment=environment))
    return dataclasses.replace(batch, trajectories=tuple(trajectories))


def with_reference(batch: Batch) -> Batch:
    """Any likely tokens, with probabilities that leave a rest."""
    random = np.random.default_rng(batch.step)

    def known(trajectory: Trajectory) -> ReferenceLogprobs:
        size = trajectory.num_sampled_tokens
        ids = random.random((size, VOCAB)).argsort(axis=-1)[:, :TOP_K].astype(np.uint32)
        shares = random.dirichlet(np.ones(TOP_K + 1), size)[:, :TOP_K]
        return ReferenceLogprobs(
            np.full(size, -1.0, dtype=np.float32),
            ids,
            np.log(shares).astype(np.float32),
        )

    changed = [dataclasses.replace(t, reference=known(t)) for t in batch.trajectories]
    return dataclasses.replace(batch, trajectories=tuple(changed))


def with_teacher(batch: Batch, *, max_tokens: int) -> Batch:
    """Every second episode has a teacher, whose prompt leaves room for the rest of the episode."""
    random = np.random.default_rng(batch.step)
    trajectories = list(batch.trajectories)
    for place in range(0, len(trajectories), 2):
        trajectory = trajectories[place]
        rest = len(trajectory.token_ids) - trajectory.run_lengths[0]
        if trajectory.branches or rest >= max_tokens:
            continue
        length = random.integers(1, max_tokens - rest + 1)
        prompt = random.integers(0, VOCAB, length).astype(np.uint32)
        trajectories[place] = dataclasses.replace(
            trajectory, teacher_prompt=pack_tokens(prompt)
        )
    return dataclasses.replace(batch, trajectories=tuple(trajectories))


def with_kept_tokens(batch: Batch) -> Batch:
    """Any tokens beside the sampled ones; some tokens were drawn from all."""
    random = np.random.default_rng(batch.step)

    def kept(trajectory: Trajectory) -> Trajectory:
        sampled = trajectory.token_ids[trajectory.sampled_mask()].tolist()
        sets = random_sets(random, sampled, vocab_size=VOCAB)
        return dataclasses.replace(
            trajectory, kept_tokens=KeptTokens.of_sets(sets).packed()
        )

    return dataclasses.replace(batch, trajectories=tuple(map(kept, batch.trajectories)))


def random_sets(
    random: np.random.Generator, sampled: Sequence[int], *, vocab_size: int
) -> list[list[int]]:
    """Up to five tokens for each sampled one, which is among them; at times none."""
    sets = []
    for token in sampled:
        size = random.integers(0, 5)
        likely_ids = random.integers(0, vocab_size, size).tolist()
        sets.append(sorted({token, *likely_ids}) if random.random() < 0.8 else [])
    return sets


def with_experts(batch: Batch) -> Batch:
    """Tokens that go anywhere, whatever the routers say; of some nothing is recorded."""
    random = np.random.default_rng(batch.step)

    def routed(trajectory: Trajectory) -> Trajectory:
        if random.random() < 0.2:
            return trajectory
        shape = (len(trajectory.token_ids), NUM_LAYERS, NUM_EXPERTS)
        ids = (
            random.random(shape)
            .argsort(axis=-1)[..., :EXPERTS_PER_TOKEN]
            .astype(np.uint8)
        )
        ids[random.random(len(ids)) < 0.1] = 255
        for part in trajectory.sequences:
            ids[part.tokens.stop - 1] = 255
        return dataclasses.replace(
            trajectory, routed_experts=RoutedExperts(ids, NUM_EXPERTS)
        )

    return dataclasses.replace(
        batch, trajectories=tuple(map(routed, batch.trajectories))
    )


def probe(config: Config) -> list[np.ndarray]:
    first = [(t, t.sequences[0]) for t in batches(config)[0].trajectories[:6]]
    return [trajectory.token_ids[part.tokens] for trajectory, part in first]
