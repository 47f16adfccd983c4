"""The conversion of a batch's trajectories to packed micro batches for each rank."""
