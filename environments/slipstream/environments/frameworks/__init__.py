"""Adapters to environments of other frameworks, each named in a run's configuration."""
