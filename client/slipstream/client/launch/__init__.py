"""Starts a run: makes checks, assigns GPUs, starts processes and ends them."""
