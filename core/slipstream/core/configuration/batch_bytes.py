"""Says what batches take: on the wire, on disk, in queues, and in the memory of each rank.

The lengths of episodes are unknown before a run, so each figure is the largest one, of a batch
whose episodes all have the most tokens that `sampling` allows. All but the weights grow in
proportion to the tokens that are sampled.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.core.configuration.config_file import largest_trajectory_bytes
from slipstream.core.kept_tokens import MAX_KEPT_TOKENS
from slipstream.core.models.model_sizes import ModelSizes
from slipstream.core.settings.config import Config

# Bytes of main memory that every trainer rank keeps for each token of the whole batch: ids and
# log-probabilities as they came, and the columns of training sequences.
RANK_BYTES_PER_TOKEN = 37
# Bytes there of each token that a sampled token was drawn from, where `sampling` cuts.
RANK_BYTES_PER_KEPT_TOKEN = 4


@dataclass(frozen=True)
class BatchBytes:
    """Sizes of a batch of the longest episodes, in bytes unless the name says otherwise."""

    num_episodes: int
    tokens_per_episode: int
    # Of one token in a queue, on the wire and in the journal, and of its recorded experts.
    per_token: int
    experts_per_token: int
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

    @classmethod
    def of(cls, config: Config, sizes: ModelSizes) -> "BatchBytes":
        """Returns the sizes for settings and a model's sizes."""
        algorithm = config.algorithm
        parallel = config.learner.parallel
        server = config.rollout_server
        replays = algorithm.router_replay != "off"
        experts_per_token = sizes.routing_bytes_per_token if replays else 0
        num_episodes = algorithm.groups_per_step * algorithm.group_size
        tokens_per_episode = config.sampling.total_tokens
        num_tokens = num_episodes * tokens_per_episode
        trajectory = largest_trajectory_bytes(config)
        batch = num_episodes * trajectory
        per_token_in_rank = RANK_BYTES_PER_TOKEN
        if config.replays_sampling:
            most_kept = min(config.sampling.top_k or sizes.vocab, sizes.vocab, MAX_KEPT_TOKENS)
            per_token_in_rank += RANK_BYTES_PER_KEPT_TOKEN * most_kept
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
            per_token=trajectory // tokens_per_episode,
            experts_per_token=experts_per_token,
            batch=batch,
            rank=num_tokens * per_token_in_rank + trained_tokens * experts_per_token,
            queue=config.queue.max_bytes,
            journal=steps_kept * batch,
            weights=weights,
            worker=weights // server.tensor_parallel_size,
            communicator_ranks=num_senders + server.count * server.tensor_parallel_size,
        )

    def describe(self, *, num_steps: int) -> Iterator[str]:
        """Yields the lines of a dry run of `num_steps` steps."""
        experts = ""
        if self.experts_per_token:
            experts = f", {self.experts_per_token:,} of them recorded experts"
        yield (
            f"If each of a step's {self.num_episodes:,} episodes has {self.tokens_per_episode:,} "
            "tokens, the most there can be:"
        )
        yield f"a token takes {self.per_token:,} bytes{experts}, and a batch {_size(self.batch)}"
        yield f"a trainer rank keeps {_size(self.rank)} of it in main memory"
        yield f"trajectories that wait may take {_size(self.queue)}, queue.max_bytes"
        yield f"the journal has {_size(self.journal)} of batches after {num_steps:,} steps"
        yield (
            f"weights are {_size(self.weights)}, {_size(self.worker)} for each engine worker; "
            f"{self.communicator_ranks:,} processes exchange them"
        )


def _size(num_bytes: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"
