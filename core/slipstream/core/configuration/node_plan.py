"""Plans a run on one machine with GPUs: ranks, rollout servers, batch and staleness bound.

The plan follows from the model's sizes, the longest reply and the GPUs. A step takes as long as the
slower of training and generation, and generation is bound by its longest reply, which has
`max_staleness` + 1 steps to end (docs/internals/staleness.md, "Which bound keeps the trainer fed").
The speeds below were measured on H200s; on another GPU their ratios change little, and ratios are
all that a plan depends on.
"""

from dataclasses import dataclass

from slipstream.core.models.model_sizes import ModelSizes

# Useful floating-point operations a second of training, and of an engine's matrix products.
TRAINED_FLOPS = 4e14
SAMPLED_FLOPS = 7e14
# Bytes a second that an engine reads of weights and KV cache.
READ_BYTES = 3.6e12
# Seconds of an engine's step, and of a training step, that depend on no token.
ENGINE_STEP_S = 3e-3
TRAINING_STEP_S = 0.085
# Episodes that an engine runs at one time when it is busy.
RUNNING_EPISODES = 512
# Share of the longest reply that a reply has on average, and tokens of a prompt: neither is known
# before a run.
MEAN_SHARE = 1 / 3
PROMPT_TOKENS = 128
# Bytes of a parameter in 16 bits: weight and gradient on each replica, and the optimizer's state
# with its master weight, which data parallel ranks divide.
RANK_BYTES = 2 + 4
DIVIDED_BYTES = 12
# Largest share of a GPU for these; activations and logits have the rest.
STATE_SHARE = 0.7
# The smallest batch and bound are chosen at which the trainer waits for replies for no more than
# this share of a step, or which reach that share of the best speed on offer.
TOLERABLE_WAIT = 1 / 3
NEAR_BEST = 0.85


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of one machine that a run may use."""

    count: int
    # Memory of the smallest one; 0 if the driver does not say it.
    memory_bytes: int = 0


@dataclass(frozen=True)
class Division:
    """How the GPUs of a machine are divided between learner and rollout servers."""

    world_size: int = 1
    # Ranks that share each matrix of the model.
    tensor_parallel: int = 1
    num_servers: int = 1


@dataclass(frozen=True)
class NodePlan:
    """The division of a machine, with batch and bound."""

    world_size: int
    num_servers: int
    episodes_per_step: int
    max_staleness: int
    tensor_parallel: int = 1


@dataclass(frozen=True)
class ModelSpeed:
    """What a token costs, in seconds of one GPU, or of one engine of several workers."""

    trained_token_s: float
    # An engine's step, and each reply that runs in it.
    engine_step_s: float
    sampled_token_s: float

    @classmethod
    def of(
        cls, sizes: ModelSizes, *, workers: int, longest_reply_tokens: int, stages: int = 1
    ) -> "ModelSpeed":
        """Returns the speed of a dense model in 16 bits with engines of `workers` GPUs a stage.

        A token goes through the `stages` one after another, which compute for other tokens
        meanwhile.
        """
        parameters = sizes.parameters
        context = PROMPT_TOKENS + longest_reply_tokens * MEAN_SHARE / 2
        cache_bytes = sizes.cache_bytes_per_token(2, workers) * context
        products_s = 2 * parameters / (workers * stages * SAMPLED_FLOPS)
        return cls(
            trained_token_s=6 * parameters / TRAINED_FLOPS,
            engine_step_s=ENGINE_STEP_S + 2 * parameters / (workers * READ_BYTES),
            sampled_token_s=products_s + cache_bytes / stages / READ_BYTES,
        )

    def step_s(self, plan: NodePlan, longest_reply_tokens: int) -> float:
        """Returns the seconds of a step: those of training, or of generation if it is slower."""
        tokens = plan.episodes_per_step * longest_reply_tokens * MEAN_SHARE
        sampling_s = self.sampled_token_s * tokens / plan.num_servers
        longest_s = self.engine_step_s * longest_reply_tokens / (plan.max_staleness + 1)
        return max(self.training_s(plan, longest_reply_tokens), sampling_s + longest_s)

    def training_s(self, plan: NodePlan, longest_reply_tokens: int) -> float:
        """Returns the seconds of a step in which the trainer computes."""
        tokens = plan.episodes_per_step * longest_reply_tokens * MEAN_SHARE
        return TRAINING_STEP_S + self.trained_token_s * tokens / plan.world_size

    def wait_share(self, plan: NodePlan, longest_reply_tokens: int) -> float:
        """Returns the share of a step in which the trainer waits for replies, 0 to 1."""
        training_s = self.training_s(plan, longest_reply_tokens)
        return 1 - training_s / self.step_s(plan, longest_reply_tokens)

    def tokens_per_s(self, plan: NodePlan, longest_reply_tokens: int) -> float:
        """Returns the trained tokens a second, for replies of a third of the longest."""
        tokens = plan.episodes_per_step * longest_reply_tokens * MEAN_SHARE
        return tokens / self.step_s(plan, longest_reply_tokens)


def divide_gpus(
    gpus: NodeGpus,
    sizes: ModelSizes,
    speed: ModelSpeed,
    *,
    workers: int,
    tensor_parallel: tuple[int, ...] = (1,),
) -> Division:
    """Returns the numbers of ranks and of rollout servers that are fastest together.

    A server has `workers` GPUs. `tensor_parallel` are the sizes that the model allows, smallest
    first: the first is taken with which ranks have room for their state, since ranks that share a
    matrix exchange tokens. Returns `Division()` where none leaves them room: such a model needs
    more GPUs, or pipeline or expert parallel ranks, which a user chooses.
    """
    for tp in tensor_parallel:
        divisions = [
            Division(
                world_size=world_size,
                tensor_parallel=tp,
                num_servers=(gpus.count - world_size) // workers,
            )
            for world_size in range(tp, gpus.count - workers + 1, tp)
            if rank_state_bytes(sizes, world_size, tp) <= STATE_SHARE * gpus.memory_bytes
        ]
        if divisions:
            return max(divisions, key=lambda division: min(rates(division, speed)))
    return Division()


def rates(division: Division, speed: ModelSpeed) -> tuple[float, float]:
    """Returns the tokens a second that busy ranks train and that busy servers sample."""
    engine_token_s = speed.sampled_token_s + speed.engine_step_s / RUNNING_EPISODES
    trained = division.world_size / speed.trained_token_s
    return trained, division.num_servers / engine_token_s


def plan_node(
    *,
    division: Division,
    speed: ModelSpeed,
    longest_reply_tokens: int,
    episodes_per_step: tuple[int, ...],
    max_staleness: tuple[int, ...],
) -> NodePlan:
    """Returns the smallest batch and bound that feed the trainer, or nearly as well as any.

    `episodes_per_step` and `max_staleness` are the values to choose from, smallest first; a value
    that is stated is the only one. The bound is raised before the batch, since a larger batch costs
    replies.
    """
    largest_bound = max_staleness[-1]
    pairs = [(episodes_per_step[0], bound) for bound in max_staleness]
    pairs += [(episodes, largest_bound) for episodes in episodes_per_step[1:]]
    plans = [
        NodePlan(
            world_size=division.world_size,
            num_servers=division.num_servers,
            episodes_per_step=episodes,
            max_staleness=bound,
            tensor_parallel=division.tensor_parallel,
        )
        for episodes, bound in pairs
    ]
    best_tokens_per_s = max(speed.tokens_per_s(plan, longest_reply_tokens) for plan in plans)
    for plan in plans:
        is_fed = speed.wait_share(plan, longest_reply_tokens) <= TOLERABLE_WAIT
        tokens_per_s = speed.tokens_per_s(plan, longest_reply_tokens)
        if is_fed or tokens_per_s >= NEAR_BEST * best_tokens_per_s:
            return plan
    raise AssertionError("the fastest plan is as fast as itself")


def rank_state_bytes(sizes: ModelSizes, world_size: int, tensor_parallel: int) -> float:
    """Returns the bytes of a rank's weights, gradients and optimizer state."""
    replicas = world_size // tensor_parallel
    return sizes.parameters / tensor_parallel * (RANK_BYTES + DIVIDED_BYTES / replicas)
