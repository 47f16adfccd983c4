"""The dashboard: a read-only page about the folders of runs, for a browser on this machine."""
