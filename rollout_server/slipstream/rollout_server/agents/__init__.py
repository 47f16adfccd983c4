"""Agents: environments that call the model themselves, over HTTP, through vLLM's own API."""
