"""Trackers that come with Slipstream."""
