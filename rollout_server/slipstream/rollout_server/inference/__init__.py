"""Parts of inference outside vLLM: drafts, prompts, memory, usage."""
