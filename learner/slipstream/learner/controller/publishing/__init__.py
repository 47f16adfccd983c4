"""New weights on their way from the trainer to the servers, and what that costs."""
