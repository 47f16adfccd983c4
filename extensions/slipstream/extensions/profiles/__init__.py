"""Profiles of a rank's steps."""
