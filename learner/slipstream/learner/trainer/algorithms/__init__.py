"""The objective of a step: advantages, losses, corrections, divergences; mostly pure functions."""
