"""The wire between parts: forms of messages and their bounds, queues, access, weights."""
