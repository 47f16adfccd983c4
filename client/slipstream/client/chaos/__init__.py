"""Runs whose processes are killed, stopped and disconnected, and checks of the files they leave."""
