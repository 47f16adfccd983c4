"""Environments that come with Slipstream and lean on no other package."""
