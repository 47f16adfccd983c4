"""The learner: the controller, which decides, and the trainer, which computes."""
