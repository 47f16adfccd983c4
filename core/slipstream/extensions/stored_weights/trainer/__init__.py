"""Writes versions to storage."""
