"""The transfer of weights: buckets, digests, communicators and shared memory."""
