"""The way from the trajectories of a batch to the packed micro batches of each rank."""
