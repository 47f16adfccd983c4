"""Low-rank adapters (LoRA) of a loaded model."""
