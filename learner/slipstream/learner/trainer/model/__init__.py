"""The Megatron model of a Hugging Face folder: construction, forward passes, log-probabilities."""
