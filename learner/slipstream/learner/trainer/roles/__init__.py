"""The other models of a run: the reference and the critic."""
