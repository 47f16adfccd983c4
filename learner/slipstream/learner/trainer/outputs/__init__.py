"""Log-probabilities, entropies and top-k tokens from hidden states and the output layer."""
