"""The critic and the reference."""
