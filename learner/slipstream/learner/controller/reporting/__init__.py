"""The files, rows of metrics and trackers that report on a run."""
