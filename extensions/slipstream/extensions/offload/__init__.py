"""State of the trainer on the host while nothing uses it."""
