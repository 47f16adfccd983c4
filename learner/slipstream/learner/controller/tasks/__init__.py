"""The environments of a run and their tasks."""
