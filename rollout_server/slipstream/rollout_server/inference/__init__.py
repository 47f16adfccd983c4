"""What inference needs beside vLLM itself: drafts, prompts, memory, usage."""
