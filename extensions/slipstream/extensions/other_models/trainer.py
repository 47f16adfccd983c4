"""The reference models and the critic: their estimates for a batch, and their updates after it.

A reference is either a frozen model, or the policy, with or without its adapters, which needs no
additional memory. Each environment has one: that of its teacher, or the one for all others.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from slipstream.core.configuration.roles import named, reference_is_policy, role_settings
from slipstream.core.environment_rules import sampling_temperatures
from slipstream.core.errors import UntrainableBatch
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import ReferenceSection, teacher_setting
from slipstream.core.types import LogprobArray, ReferenceLogprobs, Trajectory
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.algorithms.loss import ModelEstimates
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import MicroBatch, TrainingSequence
from slipstream.learner.trainer.checkpoints.stored_model import StoredModel
from slipstream.learner.trainer.model.batch_outputs import batch_outputs
from slipstream.learner.trainer.model.model import MemoryPart, ParallelModel, TrainedModel
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.model.schedule import (
    forward_logprobs,
    rank_micro_batches,
    run_schedule,
    update_weights,
)
from slipstream.learner.trainer.opening import load_frozen, load_trained
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.learner.trainer.step import StepPart
from slipstream.learner.trainer.step_cost import StageTimes
from slipstream.learner.trainer.weights.export import hf_tensors
from slipstream.protocol.codec import unpack_tokens
from torch import Tensor

# Standard deviation of the initial values for any hidden size: the states are normalised.
INITIAL_SCALE = 0.1
# Sums over tokens that `value_loss` returns.
_NUM_SUMS = 4


class Roles(StepPart):
    """The models that the algorithm needs besides the policy."""

    def __init__(self, config: Config, policy: Policy) -> None:
        """Loads the models that `config` asks for, on the policy's ranks; collective.

        Raises ConfigError for a model or a setting that cannot work.
        """
        settings = role_settings(config)
        self._section = section = config.reference or ReferenceSection()
        self.reference: Reference | PolicyAsReference | None = None
        # The models of teachers that are no servers, by their names.
        self.teachers: dict[str, Reference | PolicyAsReference] = {}
        self.critic: Critic | None = None
        if reference_is_policy(config):
            self.reference = PolicyAsReference(policy, config, keeps_adapters=section.policy)
        elif "reference" in settings:
            with named(config, "reference"):
                self.reference = Reference(settings["reference"], policy.ranks)
        for name, teacher in section.teachers.items() if config.needs_reference else ():
            setting = teacher_setting(name)
            if teacher.policy:
                self.teachers[name] = PolicyAsReference(policy, config, keeps_adapters=True)
            elif setting in settings:
                with named(config, setting):
                    self.teachers[name] = Reference(settings[setting], policy.ranks)
        if "critic" in settings:
            with named(config, "critic"):
                self.critic = Critic(settings["critic"], policy.ranks)
        self._refresh_every_steps = section.refresh_every_steps

    def estimates(self, batch: Batch, stages: StageTimes) -> list[ModelEstimates]:
        """Returns the estimates for each trajectory; the same on every rank."""
        with stages.measure("estimates"):
            references = self._references(batch)
            nothing = [None] * len(batch.trajectories)
            values = self.critic.values(batch) if self.critic is not None else nothing
        return [ModelEstimates(a, values=b) for a, b in zip(references, values, strict=True)]

    def _references(self, batch: Batch) -> list[ReferenceLogprobs | None]:
        """Returns the log-probabilities by each trajectory's own reference; collective.

        Those of a server came with the trajectory.
        """
        references = [trajectory.reference for trajectory in batch.trajectories]
        places_by_teacher: dict[str, list[int]] = {}
        for place, trajectory in enumerate(batch.trajectories):
            teacher = self._section.teacher_of(trajectory.environment)
            places_by_teacher.setdefault(teacher, []).append(place)
        # Every rank has the same batch, so all of them call the same models in this order.
        for teacher, places in places_by_teacher.items():
            model = self.teachers.get(teacher) if teacher else self.reference
            if model is None:
                continue
            members = tuple(batch.trajectories[place] for place in places)
            own_batch = dataclasses.replace(batch, trajectories=members)
            for place, logprobs in zip(places, model.logprobs(own_batch), strict=True):
                references[place] = logprobs
        return references

    def models(self) -> dict[str, ParallelModel]:
        """Returns the critic, and references that are models apart from the policy, by name."""
        models: dict[str, ParallelModel] = {}
        if isinstance(self.reference, Reference):
            models["reference"] = self.reference.model
        for name, teacher in self.teachers.items():
            if isinstance(teacher, Reference):
                models[teacher_setting(name)] = teacher.model
        if self.critic is not None:
            models["critic"] = self.critic.model
        return models

    def stored_models(self) -> list[StoredModel]:
        """Returns the models that checkpoints must store: the critic and a refreshed reference."""
        stored = []
        for name, model in self.models().items():
            optimizer = model.optimizer if isinstance(model, TrainedModel) else None
            if optimizer is not None or (name == "reference" and self._refresh_every_steps):
                stored.append(
                    StoredModel(
                        name,
                        model.chunks,
                        optimizer,
                        model.ranks.in_force,
                    )
                )
        return stored

    def train(
        self,
        sequences: Sequence[TrainingSequence],
        mini_batches: Sequence[Sequence[int]],
        stages: StageTimes,
    ) -> dict[str, float]:
        """Trains the critic."""
        if self.critic is None:
            return {}
        with stages.measure("critic"):
            return self.critic.train(sequences, mini_batches)

    def ends(self, policy: Policy, batch: Batch) -> dict[str, float]:
        """Copies the policy into the reference if a refresh is due."""
        every = self._refresh_every_steps
        if isinstance(self.reference, Reference) and every and (batch.step + 1) % every == 0:
            with self.reference.model.memory.resident(MemoryPart.PARAMETERS):
                self.reference.refresh(policy)
        return {}


class Reference:
    """A frozen reference model; every method is collective and itself puts its layout in force."""

    def __init__(self, settings: Config, ranks: Ranks) -> None:
        """Loads the model; `settings` must come from `role_settings`."""
        self._settings = settings
        self._ranks = ranks.placed(settings.learner.parallel)
        with self._ranks.in_force():
            self.model = load_frozen(settings, self._ranks)

    def logprobs(self, batch: Batch) -> list[ReferenceLogprobs]:
        """Returns the result of `reference_logprobs` at the sampling temperature."""
        with self._ranks.in_force():
            return reference_logprobs(self.model, batch, self._settings)

    @torch.no_grad()
    def refresh(self, policy: Policy) -> None:
        """Copies the policy's current weights into the reference, whose parameters are resident.

        The two layouts may differ.

        Weights are copied tensor by tensor. Tensors that Megatron fuses are joined as soon as all
        of them have arrived, so that no rank ever holds the whole model. Each tensor is sent to
        every rank once.
        """
        with self._ranks.in_force():
            # The tasks have the names of the policy's files; the model's own folder may differ.
            all_tasks = policy.bridge.get_conversion_tasks(self.model.chunks)
        tasks = [
            task for task in all_tasks if task is not None and task.megatron_module is not None
        ]
        waiting: dict[str, Tensor] = {}
        # A tensor may hold the matrices of all experts, each of which is a parameter.
        needed_by: dict[str, dict[str, Megatron]] = {}
        for task in tasks:
            for name in _sources(task):
                needed_by.setdefault(name, {})[task.global_param_name] = task
        for name, tensor in hf_tensors(policy, self.model.dtype):
            if name not in needed_by:
                continue
            waiting[name] = tensor
            for task in list(needed_by[name].values()):
                if any(source not in waiting for source in _sources(task)):
                    continue
                with self._ranks.in_force():
                    # Bridge loads a folder in this way.
                    weights = policy.bridge._model_bridge.maybe_modify_loaded_hf_weight(
                        task.mapping.hf_param, waiting
                    )
                    part = task.mapping.hf_to_megatron(weights, task.megatron_module)
                    if part is not None:
                        task.param_weight.copy_(part)
                for source in _sources(task):
                    del needed_by[source][task.global_param_name]
                    if not needed_by[source]:
                        del needed_by[source], waiting[source]
        missing = sorted(needed_by.keys() - waiting.keys())
        assert not missing, f"the policy has no {', '.join(missing)}"
        with self._ranks.in_force():
            self.model.bridge._model_bridge._broadcast_shared_embeddings(self.model.chunks)


def reference_logprobs(
    model: ParallelModel, batch: Batch, settings: Config
) -> list[ReferenceLogprobs]:
    """Returns, for each trajectory, the log-probabilities of sampled tokens and of top-k tokens.

    A trajectory with a teacher's prompt is read behind that in place of its own. The top-k tokens
    are the `settings.reference.top_k` most likely tokens at each sampled token's position, or none
    without `settings.reference`. The layout of `model` must be in force. Collective.
    """
    top_k = settings.reference.top_k if settings.reference is not None else 0
    forward = functools.partial(
        forward_logprobs, model, temperature=settings.sampling.temperature, top_k=top_k
    )
    outputs = batch_outputs(
        model,
        as_teachers_read(batch),
        forward,
        width=1 + 2 * top_k if top_k else 0,
        temperatures=sampling_temperatures(
            settings, [trajectory.environment for trajectory in batch.trajectories]
        ),
    )
    columns = [values.reshape(len(values), -1) for values in outputs]
    return [
        ReferenceLogprobs(
            values[:, 0], values[:, 1 : 1 + top_k].astype(np.uint32), values[:, 1 + top_k :]
        )
        for values in columns
    ]


def as_teachers_read(batch: Batch) -> Batch:
    """Returns the batch with the prompts of teachers in place of those that the policy read."""
    trajectories = tuple(map(_as_teacher_reads, batch.trajectories))
    return dataclasses.replace(batch, trajectories=trajectories)


def _as_teacher_reads(trajectory: Trajectory) -> Trajectory:
    if not trajectory.teacher_prompt:
        return trajectory
    prompt = unpack_tokens(trajectory.teacher_prompt)
    prompt_length, *other_lengths = trajectory.run_lengths
    return dataclasses.replace(
        trajectory,
        token_ids=np.concatenate([prompt, trajectory.token_ids[prompt_length:]]),
        run_lengths=(len(prompt), *other_lengths),
        # Images and experts are those of the tokens that the policy read.
        images=(),
        image_places=(),
        routed_experts=None,
        reference=None,
        prompt_logprobs=b"",
        teacher_prompt=b"",
    )


def _sources(task: Megatron) -> Sequence[str]:
    names = task.mapping.hf_param
    return [names] if isinstance(names, str) else list(names.values())


class PolicyAsReference:
    """The policy before a step, used as the reference, or what it is without its adapters."""

    def __init__(self, policy: Policy, config: Config, *, keeps_adapters: bool) -> None:
        self.model = policy
        self._config = config
        self._keeps_adapters = keeps_adapters

    def logprobs(self, batch: Batch) -> list[ReferenceLogprobs]:
        """Returns the log-probabilities as `Reference.logprobs` does; collective."""
        policy = self.model
        sharing = self.model.sharing
        noted = None if sharing is None else sharing.saved
        adapters = nullcontext() if self._keeps_adapters else without_adapters(policy.chunks)
        with adapters:
            logprobs = reference_logprobs(policy, batch, self._config)
        if sharing is not None and noted is not None:
            # The work that sharing saves in this pass does not count for a training step.
            sharing.saved = noted
        return logprobs


@contextmanager
def without_adapters(chunks: Sequence[Megatron]) -> Iterator[None]:
    """Switches every adapter of `chunks` off inside the context."""
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
    from slipstream.learner.trainer.layers.expert_adapters import ExpertAdapter

    modules = [module for chunk in chunks for module in chunk.modules()]
    adapted = [module for module in modules if isinstance(module, AdapterWrapper)]
    of_experts = [module for module in modules if isinstance(module, ExpertAdapter)]
    for module in adapted:
        module.disable_adapter_layers()
    for adapter in of_experts:
        adapter.is_enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapter_layers()
        for adapter in of_experts:
            adapter.is_enabled = True


class Critic:
    """The critic model; every method is collective and itself puts the model's layout in force."""

    def __init__(self, settings: Config, ranks: Ranks) -> None:
        """Loads the model; `settings` must come from `role_settings`."""
        assert settings.critic is not None
        self._section = settings.critic
        # Forward and backward passes over a mini-batch of the newest `train`.
        self._num_passes = 0
        self._ranks = ranks.placed(settings.learner.parallel)

        def with_value_heads(chunks: list[Megatron]) -> list[Megatron]:
            for chunk in chunks:
                if chunk.pre_process:
                    # With tied embeddings the projection was a second copy: without it no gradients
                    # of a copy are added.
                    chunk.embedding.word_embeddings.weight.shared_embedding = False
                chunk.share_embeddings_and_output_weights = False
                if chunk.post_process:
                    device = next(chunk.decoder.parameters()).device
                    seed = settings.run.seed
                    chunk.output_layer = ValueHead(chunk.config, seed=seed, device=device)
            return chunks

        with self._ranks.in_force():
            self.model = load_trained(settings, self._ranks, change=with_value_heads)

    def values(self, batch: Batch) -> list[LogprobArray]:
        """Returns, for each trajectory, the expected return before each sampled token; float32."""

        def finish(
            place: int, micro_batch: MicroBatch, output: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            values = output[0, :, 0]
            return values.sum(), micro_batch.loss_mask.sum().to(torch.int), values

        forward = functools.partial(
            run_schedule,
            self.model,
            finish=finish,
            forward_only=True,
        )
        with self._ranks.in_force(), torch.no_grad():
            return batch_outputs(self.model, batch, forward)

    def train(
        self, sequences: Sequence[TrainingSequence], mini_batches: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        """Takes one optimizer step per mini-batch towards the returns; returns metrics.

        `mini_batches` has the indices into `sequences` of each mini-batch. Raises UntrainableBatch
        for a loss or gradient that is not finite, before that mini-batch changes a weight.
        """
        total = torch.zeros(_NUM_SUMS, dtype=torch.float64)
        norms = []
        self._num_passes = 0
        parts = self.model.memory.resident(MemoryPart.PARAMETERS, MemoryPart.GRADIENTS)
        with self._ranks.in_force(), parts:
            for members in mini_batches:
                gradients = functools.partial(self._accumulate, sequences, members)
                sums = gradients()
                loss = float(sums[0])
                if not math.isfinite(loss):
                    raise UntrainableBatch(
                        f"the critic's loss is {loss}; its weights were not changed"
                    )
                norms.append(update_weights(self.model, self._section.learning_rate, gradients))
                total += sums
            # Otherwise the next forward pass gathers them, and a checkpoint before it would hold
            # old parameters.
            self.model.gather_parameters()
        loss, num_tokens, clipped, value = total.tolist()
        tokens = max(1.0, num_tokens)
        values, returns = (
            np.concatenate([getattr(sequence, name)[sequence.loss_mask] for sequence in sequences])
            for name in ("values", "returns")
        )
        metrics = {
            "value_loss": loss / tokens,
            "value_clip_fraction": clipped / tokens,
            "value_mean": value / tokens,
            "critic_grad_norm": sum(norms) / len(norms),
            # The values before the step, over the trained tokens.
            "explained_variance": explained_variance(values, returns),
        }
        if self.model.scaler is not None:
            metrics["critic_gradient_overflows"] = float(self._num_passes - len(norms))
        return metrics

    def _accumulate(self, sequences: Sequence[TrainingSequence], members: Sequence[int]) -> Tensor:
        """Accumulates one mini-batch's gradients; returns its sums over all ranks."""

        def finish(
            place: int, micro_batch: MicroBatch, output: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            loss, sums = value_loss(output[0, :, 0], micro_batch, clip=self._section.value_clip)
            return loss, micro_batch.loss_mask.sum().to(torch.int), sums

        share = rank_micro_batches(self.model, sequences, members)
        self._num_passes += 1
        self.model.zero_grad()
        sums_of_parts = run_schedule(self.model, share, finish, forward_only=False)
        sums = torch.zeros(_NUM_SUMS, dtype=torch.float64)
        if self._ranks.counts:
            sums += sum(part.cpu() for part in sums_of_parts)
        return self._ranks.sum(sums)


def value_loss(values: Tensor, micro_batch: MicroBatch, *, clip: float) -> tuple[Tensor, Tensor]:
    """Returns the loss of `values` [tokens], summed over `loss_mask`, and sums for metrics.

    The loss of a token is half the squared error of its value. If the value differs by more than
    `clip` from the old value, it is also clipped to this distance, and the larger error is used, so
    that a value gains nothing by a larger distance. `clip` 0 turns this off. The sums are detached
    float64 [4]: of losses, of trained tokens, of tokens whose error was larger after clipping, and
    of values. Source: PPO's reference implementation, Huang et al., "The 37 implementation details
    of PPO" (2022), 9.
    """
    mask = micro_batch.loss_mask
    old = micro_batch.values
    returns = micro_batch.returns
    assert old is not None
    assert returns is not None
    errors = (values - returns).square()
    bounded = errors
    if clip:
        bounded = (values.clamp(old - clip, old + clip) - returns).square()
    losses = torch.where(mask, 0.5 * torch.maximum(errors, bounded), 0.0)
    with torch.no_grad():
        columns = (losses, mask, (bounded > errors) & mask, torch.where(mask, values, 0.0))
        sums = torch.stack([column.sum(dtype=torch.float64) for column in columns])
    return losses.sum(), sums


def explained_variance(values: LogprobArray, returns: LogprobArray) -> float:
    """Returns 1 - var(returns - values) / var(returns): 1 is perfect, 0 as good as a constant.

    Returns 0 if the returns do not vary or are empty.
    """
    variance = float(returns.astype(np.float64).var()) if returns.size else 0.0
    if variance == 0.0:
        return 0.0
    return 1.0 - float((returns.astype(np.float64) - values).var()) / variance


class ValueHead(torch.nn.Module):
    """A linear layer to one value per token, the same on all ranks of a stage; computes in float32.

    Megatron calls it as an output layer: [tokens, batch, hidden size] gives [tokens, batch, 1].
    With sequence parallelism each rank computes the values of its own tokens. The values are then
    gathered, and the gradients are summed over the tensor parallel ranks.
    """

    def __init__(
        self,
        config: Megatron,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        scale = INITIAL_SCALE / math.sqrt(config.hidden_size)
        start = torch.randn(1, config.hidden_size, generator=generator) * scale
        self.weight = torch.nn.Parameter(start.to(device, config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=device, dtype=config.params_dtype))
        # An output layer has Adam where matrices have Muon.
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        self._is_split = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Returns the values, and None in place of a bias that Megatron would add."""
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self._is_split:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # Every rank computes the same loss from the gathered values: its own part of the
            # gradient is complete.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
