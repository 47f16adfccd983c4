"""Rounds of held-out episodes while a run trains."""
