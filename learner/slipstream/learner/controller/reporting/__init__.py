"""The files, rows and trackers that report on a run."""
