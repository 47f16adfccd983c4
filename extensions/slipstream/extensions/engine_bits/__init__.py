"""The learner computes the bits of the engine."""
