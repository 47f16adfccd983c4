"""The engine's kernels and layers in the learner."""
