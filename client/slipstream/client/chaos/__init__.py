"""Runs under faults: killed, stopped and cut off processes, and what their files say afterwards."""
