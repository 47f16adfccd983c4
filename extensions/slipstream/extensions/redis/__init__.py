"""The queue of trajectories on Redis or Valkey."""
