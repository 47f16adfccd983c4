"""The trajectory queue, which brings finished trajectories to the controller at least once."""
