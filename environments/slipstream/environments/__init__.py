"""Environments that come with Slipstream and import no other package at the top."""
