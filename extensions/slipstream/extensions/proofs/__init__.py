"""Proofs of functions of one's own, before they train."""
