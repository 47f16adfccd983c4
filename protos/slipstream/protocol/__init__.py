"""The protocol between the parts of a run: messages, their bounds, queues, access, weights."""
