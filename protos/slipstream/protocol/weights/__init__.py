"""The transport of weights: buckets, digests, communicators and shared memory."""
