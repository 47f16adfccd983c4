"""Greedy replies of vLLM as it is, of a model alone and with a layer that drafts: a program.

`PYTHONPATH=tests python -m support.rigs.stock_drafts MODEL LAYER TOKENS` prints the tokens of both
and the counts of drafts.
"""

import json
import os
import sys

PROMPTS = [[1, 4 + n, 5 + n % 7, 6, 3] for n in range(8)]
NUM_TOKENS = 100


def replies(
    model: str, drafts: dict[str, object] | None
) -> tuple[list[list[int]], dict[str, int]]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=len(PROMPTS),
        gpu_memory_utilization=0.05,
        disable_log_stats=False,
        speculative_config=drafts,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    generation = engine.generate(prompts, sampling, use_tqdm=False)
    values = {
        metric.name: metric.value
        for metric in engine.get_metrics()
        if hasattr(metric, "value")
    }
    kinds = ("draft", "accepted")
    names = {kind: f"vllm:spec_decode_num_{kind}_tokens" for kind in kinds if drafts}
    counts = {kind: values[name] for kind, name in names.items()}
    return [list(reply.outputs[0].token_ids) for reply in generation], counts


def main() -> None:
    model, layer, tokens = sys.argv[1:]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    drafts = {"method": "eagle", "model": layer, "num_speculative_tokens": int(tokens)}
    alone, _ = replies(model, None)
    drafted, counts = replies(model, drafts)
    print(json.dumps({"alone": alone, "drafted": drafted} | counts))


if __name__ == "__main__":
    main()
