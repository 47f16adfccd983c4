"""Everything that imports vLLM: the engine, its HTTP application for agents, its weights."""
