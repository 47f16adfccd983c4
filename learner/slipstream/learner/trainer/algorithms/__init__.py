"""What a step optimises: advantages, losses, corrections, divergences; mostly pure functions."""
