"""Parts of inference that do not use vLLM: the wait of prompts, CUDA graph sizes, usage."""
