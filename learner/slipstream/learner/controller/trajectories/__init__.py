"""The processing of trajectories, from deliveries of the queue to journaled batches."""
