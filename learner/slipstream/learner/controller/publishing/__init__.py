"""The delivery of new weights from the trainer to the rollout servers, and its cost."""
