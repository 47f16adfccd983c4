"""Layers of the models, and what they share within a micro batch."""
