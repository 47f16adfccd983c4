"""Prefixes that sequences share are computed once."""
