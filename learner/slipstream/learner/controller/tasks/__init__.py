"""The environments of a run, and the tasks that they give."""
