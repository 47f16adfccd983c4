"""The rollout server: a vLLM engine, its episodes, and the weights that flow into it."""
