"""Publishes new weights from the trainer: export, buckets, senders, publish."""
