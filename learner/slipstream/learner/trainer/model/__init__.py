"""The Megatron model of a Hugging Face folder: its making, its passes, its log-probabilities."""
