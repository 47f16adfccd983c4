"""A server answers for the reference model."""
