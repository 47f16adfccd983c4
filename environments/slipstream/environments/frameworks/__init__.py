"""Environments of other frameworks, each named in a configuration as it is."""
