"""Facts about the models that can be trained, read from their folders, and the rules on them."""
