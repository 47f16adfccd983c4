"""The way of new weights out of the trainer: export, buckets, senders, publish."""
