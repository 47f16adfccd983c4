"""The start of a run: checks, placement, processes and their end."""
