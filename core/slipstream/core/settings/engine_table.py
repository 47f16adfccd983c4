"""Rules on the table `rollout_server.engine`: which of vLLM's own arguments users may set.

This module does not import vLLM, so that its rules work on every machine.
"""

from collections.abc import Iterator

from slipstream.core.settings.sections import RolloutServerSection

SECTION = "rollout_server.engine"
# mp: each worker has a process; uni: one worker in the engine's process.
_EXECUTORS = ("mp", "uni")
# Ways of taking drafted tokens that leave the distribution what it is.
_EXACT_REJECTIONS = ("standard", "block")
# Most tokens of a batch by default: vLLM's default on the largest GPU.
_MOST_BATCHED = 16384

_WEIGHTS = "the learner's weights could not be loaded into such an engine"
_ADAPTERS = "set lora.publish"
_OFFLOADED = "layers that are fetched from main memory would stay those of the start"
_REPLICAS = "set rollout_server.count for more engines"
_WORKERS = "set rollout_server.tensor_parallel_size"
_TOKENS = "prompts and replies are token ids, text is made elsewhere"
_PROCESSED = "the learner needs the log-probabilities of the distribution that was sampled from"
_PREFIXES = "prefixes that are cached outside of the engine would stay those of older weights"
_MOVED = "an expert that vLLM has moved would get the weights of another at each publish"
_TURNED_AWAY = "set rollout_server.max_episodes; a request that is turned away is a failed episode"
_TEXT = "the engine samples replies"
_PREPARED = "the learner would prepare images without it"
_DRAFTS = "set it in rollout_server.engine.speculative_config"
# Arguments that must agree with other settings or with Slipstream's code, each with the setting to
# use instead or the reason.
OWNED = {
    "model": "set model.path",
    "model_weights": "set model.path",
    "hf_config_path": "set model.path",
    "hf_overrides": "the learner would compute without them; change the model's config.json",
    "dtype": "set model.dtype",
    "seed": "it is drawn anew at each start",
    "max_model_len": "set sampling.max_episode_tokens",
    "max_num_seqs": "set rollout_server.max_episodes",
    "quantization": "set rollout_server.quantization",
    "quantization_config": "set rollout_server.quantization",
    "tensor_parallel_size": _WORKERS,
    "pipeline_parallel_size": "set rollout_server.pipeline_parallel_size",
    "prefill_context_parallel_size": _WORKERS,
    "device_ids": "set rollout_server.devices",
    "gpu_memory_utilization": "set rollout_server.gpu_memory_utilization",
    "enforce_eager": "set rollout_server.enforce_eager",
    "enable_sleep_mode": "set controller.turns",
    "data_parallel_size": _REPLICAS,
    "data_parallel_size_local": _REPLICAS,
    "nnodes": _REPLICAS,
    "logprobs_mode": _PROCESSED,
    "max_logprobs": "one log-probability is asked for, that of the sampled token",
    "enable_trace_replay": "the engine samples replies",
    "return_sampling_mask": "set sampling.top_p, top_k or min_p",
    "logits_processors": _PROCESSED,
    "generation_config": "set the table sampling",
    "override_generation_config": "set the table sampling",
    "spec_method": _DRAFTS,
    "spec_model": _DRAFTS,
    "spec_tokens": _DRAFTS,
    "tokenizer": _TOKENS,
    "tokenizer_mode": _TOKENS,
    "skip_tokenizer_init": _TOKENS,
    "stream_interval": "replies are handed out in chunks already",
    "enable_lora": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "max_cpu_loras": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "lora_target_modules": _ADAPTERS,
    "lora_dtype": _ADAPTERS,
    "default_mm_loras": _ADAPTERS,
    "mm_processor_kwargs": _PREPARED,
    "media_io_kwargs": _PREPARED,
    "worker_cls": _WEIGHTS,
    "worker_extension_cls": _WEIGHTS,
    "weight_transfer_config": _WEIGHTS,
    "offload_group_size": _OFFLOADED,
    "offload_num_in_group": _OFFLOADED,
    "offload_prefetch_step": _OFFLOADED,
    "offload_params": _OFFLOADED,
    "kv_transfer_config": _PREFIXES,
    "kv_offloading_backend": _PREFIXES,
    "kv_events_config": "it opens a port without TLS or token",
    "enable_eplb": _MOVED,
    "eplb_config": _MOVED,
    "watermark_config": _PROCESSED,
    "runner": _TEXT,
    "convert": _TEXT,
    "max_num_queued_reqs": _TURNED_AWAY,
    "max_num_queued_tokens": _TURNED_AWAY,
    "scheduler_cls": "the rollout server sets its own",
    "enable_return_routed_experts": "set algorithm.router_replay",
    "aux_output_config": "set algorithm.router_replay",
    "disable_log_stats": "generated tokens are counted there",
}


def engine_problems(server: RolloutServerSection) -> Iterator[str]:
    """Yields one line for each rule that the table breaks, whatever vLLM's version is."""
    table = server.engine
    max_episodes = server.max_episodes
    for name in table:
        if name in OWNED:
            yield f"{SECTION}.{name} cannot be passed through: {OWNED[name]}"
    executor = table.get("distributed_executor_backend", "mp")
    if executor not in _EXECUTORS:
        yield (
            f"{SECTION}.distributed_executor_backend must be one of {', '.join(_EXECUTORS)}, "
            f"got {executor!r}"
        )
    if executor == "uni" and server.num_workers > 1:
        yield (
            f"{SECTION}.distributed_executor_backend must be 'mp' with several workers, "
            f"tensor_parallel_size * pipeline_parallel_size = {server.num_workers}, got 'uni'"
        )
    drafts = table.get("speculative_config")
    # vLLM takes names with hyphens, too.
    arguments = drafts.items() if isinstance(drafts, dict) else ()
    draft_settings = {key.replace("-", "_"): value for key, value in arguments}
    method = draft_settings.get("rejection_sample_method")
    if method not in (None, *_EXACT_REJECTIONS):
        yield (
            f"{SECTION}.speculative_config.rejection_sample_method must be one of "
            f"{', '.join(_EXACT_REJECTIONS)}, got {method!r}: another keeps drafted tokens "
            "that the model did not sample"
        )
    # vLLM accepts this word in upper and lower case.
    if str(table.get("load_format", "")).lower() == "ipc_cache":
        yield (
            f"{SECTION}.load_format cannot be 'ipc_cache': such weights lie in another process, "
            "and a publish would change them for every engine there"
        )
    batched = table.get("max_num_batched_tokens", _MOST_BATCHED)
    if isinstance(batched, int) and batched < max_episodes:
        whose = "" if "max_num_batched_tokens" in table else " (vLLM's own)"
        yield (
            f"{SECTION}.max_num_batched_tokens must be at least rollout_server.max_episodes: each "
            f"episode has a token in a batch, got {batched}{whose} and {max_episodes}"
        )
