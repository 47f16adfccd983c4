"""Environments that come with Slipstream, written as users write theirs."""
