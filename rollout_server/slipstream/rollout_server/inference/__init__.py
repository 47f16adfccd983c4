"""Parts of inference that do not use vLLM: drafts, prompt waits, CUDA graph sizes, usage."""
