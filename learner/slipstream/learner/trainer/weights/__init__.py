"""Exports new weights from the trainer ranks, in buckets, and sends them to rollout servers."""
