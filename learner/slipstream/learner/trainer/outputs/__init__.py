"""The log-probabilities that follow from a model's output layer."""
