"""`slipstream doctor`: looks at a machine, and says what to change before a run fails on it."""
