"""Parts of inference that do not use vLLM: drafts, the wait of prompts, CUDA graph sizes, usage."""
