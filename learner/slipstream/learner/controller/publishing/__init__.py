"""The way of new weights from the trainer to the servers, and its costs."""
