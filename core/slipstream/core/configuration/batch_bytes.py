"""Says what batches take: on the wire, on disk, in queues, and in the memory of each rank.

The lengths of episodes are unknown before a run, so each figure is the largest one, of a batch
whose episodes all have the most tokens that `sampling` allows. All but the weights grow in
proportion to the tokens that are sampled.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.core.configuration.config_file import largest_trajectory_bytes
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.kept_tokens import BYTES_PER_COUNT, BYTES_PER_ID, MAX_KEPT_TOKENS
from slipstream.core.models.model_sizes import ModelSizes
from slipstream.core.settings.config import Config

# Bytes of main memory that every trainer rank keeps for each token of the whole batch: ids and
# log-probabilities as they came, and the columns of training sequences. Measured by
# benchmarks/controller/batches.py.
RANK_BYTES_PER_TOKEN = 46


@dataclass(frozen=True)
class BatchBytes:
    """Sizes of a batch of the longest episodes, in bytes unless the name says otherwise."""

    num_episodes: int
    tokens_per_episode: int
    # Of one token in a queue, on the wire and in the journal; of its recorded experts, and of the
    # tokens that it was drawn from.
    per_token: int
    experts_per_token: int
    kept_per_token: int
    # Of an episode's images.
    images: int
    batch: int
    # Kept by each trainer rank: tokens of all episodes, experts of those that it trains.
    rank: int
    # Trajectories that may wait in the queue, and the batches that the journal has at the end.
    queue: int
    journal: int
    # The model's weights as they are published, of one engine worker, and the members of the
    # communicator that carries them.
    weights: int
    worker: int
    communicator_ranks: int
    # The ranks of one of the learner's hosts.
    ranks_per_host: int

    @classmethod
    def of(cls, config: Config, sizes: ModelSizes) -> "BatchBytes":
        """Returns the sizes for settings and a model's sizes."""
        algorithm = config.algorithm
        parallel = config.learner.parallel
        server = config.rollout_server
        replays = algorithm.router_replay != "off"
        experts_per_token = sizes.routing_bytes_per_token if replays else 0
        num_episodes = algorithm.groups_per_step * group_sizes_of(config).largest
        tokens_per_episode = config.sampling.total_tokens
        num_tokens = num_episodes * tokens_per_episode
        trajectory = largest_trajectory_bytes(config)
        batch = num_episodes * trajectory
        kept_per_token = 0
        if config.replays_sampling:
            most_kept = min(config.sampling.top_k or sizes.vocab, sizes.vocab, MAX_KEPT_TOKENS)
            kept_per_token = BYTES_PER_COUNT + BYTES_PER_ID * most_kept
        images = config.sampling.max_images * config.sampling.max_image_bytes
        per_token_in_rank = RANK_BYTES_PER_TOKEN + kept_per_token
        data_parallel = config.learner.world_size // (parallel.tp * parallel.pp * parallel.cp)
        trained_tokens = -(-num_tokens // data_parallel)
        item_bytes = 4 if config.model.dtype == "float32" else 2
        weights = sizes.parameters * item_bytes
        num_senders = parallel.pp * (parallel.ep if sizes.experts else 1)
        checkpoint = config.checkpoint
        # Without `keep_batches` those stay that a resume from the oldest kept checkpoint needs.
        steps_kept = min(config.run.steps, checkpoint.keep_last * checkpoint.every_steps)
        if checkpoint.keep_batches:
            steps_kept = config.run.steps
        return cls(
            num_episodes=num_episodes,
            tokens_per_episode=tokens_per_episode,
            per_token=(trajectory - images) // tokens_per_episode,
            experts_per_token=experts_per_token,
            kept_per_token=kept_per_token,
            images=images,
            batch=batch,
            rank=num_tokens * per_token_in_rank
            + trained_tokens * experts_per_token
            + num_episodes * images,
            queue=config.queue.max_bytes,
            journal=steps_kept * batch,
            weights=weights,
            worker=int(
                weights
                * sizes.stage_share(server.pipeline_parallel_size)
                / server.tensor_parallel_size
            ),
            communicator_ranks=num_senders + server.count * server.num_workers,
            ranks_per_host=config.learner.ranks_per_node or config.learner.world_size,
        )

    def describe(self, *, num_steps: int) -> Iterator[str]:
        """Yields the lines of a dry run of `num_steps` steps."""
        parts = ""
        if self.experts_per_token:
            parts += f", {self.experts_per_token:,} of them recorded experts"
        if self.kept_per_token:
            parts += f", {self.kept_per_token:,} of them the tokens that it was drawn from"
        if self.images:
            parts += f", an episode's images {shown_bytes(self.images)}"
        yield (
            f"If each of a step's {self.num_episodes:,} episodes has {self.tokens_per_episode:,} "
            "tokens, the most there can be:"
        )
        batch = shown_bytes(self.batch)
        yield f"a token takes {self.per_token:,} bytes{parts}, and a batch {batch}"
        on_host = ""
        if self.ranks_per_host > 1:
            on_host = f", {shown_bytes(self.ranks_per_host * self.rank)} on a host of "
            on_host += f"{self.ranks_per_host} ranks"
        yield f"a trainer rank keeps {shown_bytes(self.rank)} of it in main memory{on_host}"
        yield f"trajectories that wait may take {shown_bytes(self.queue)}, queue.max_bytes"
        yield f"the journal has {shown_bytes(self.journal)} of batches after {num_steps:,} steps"
        yield (
            f"weights are {shown_bytes(self.weights)}, {shown_bytes(self.worker)} for each engine "
            f"worker; {self.communicator_ranks:,} processes exchange them"
        )


def shown_bytes(num_bytes: float) -> str:
    """Returns a number of bytes for people, in a unit of powers of ten."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"
