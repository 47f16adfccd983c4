"""The trainer's checkpoints, which it can load in any layout."""
