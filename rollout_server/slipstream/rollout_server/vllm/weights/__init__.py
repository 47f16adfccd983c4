"""Receives new weights inside the workers of vLLM."""
