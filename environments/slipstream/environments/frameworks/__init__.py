"""Adapters that turn environments of other frameworks into environments of a run."""
