"""All modules that import vLLM: the engine, its HTTP application for agents, its weights."""
