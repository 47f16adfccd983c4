"""The trajectory queue: how finished trajectories reach the controller, at least once."""
