"""Environments that come with Slipstream, written in the same way as a user's own environments."""
