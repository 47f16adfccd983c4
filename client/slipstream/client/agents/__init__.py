"""Serves agents: runs their code, and answers their HTTP calls to the model."""
