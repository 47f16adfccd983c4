"""The Megatron model of a Hugging Face folder: construction, passes and log-probabilities."""
