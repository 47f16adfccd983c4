"""Serves a client's own loop over the Tinker API: its operations, and the HTTP process in front."""
