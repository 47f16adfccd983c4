"""The way of trajectories, from deliveries of the queue to a journaled batch."""
