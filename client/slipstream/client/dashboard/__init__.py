"""Serves the dashboard, a read-only page about runs, to browsers on this machine."""
