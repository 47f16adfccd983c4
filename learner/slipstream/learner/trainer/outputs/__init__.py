"""Log-probabilities from the output layer."""
