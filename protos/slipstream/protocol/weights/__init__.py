"""How weights travel: buckets, digests, communicators and shared memory."""
