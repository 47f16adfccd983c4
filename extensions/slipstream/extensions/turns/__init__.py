"""Engines rest while the learner trains on their device."""
