"""The records of a run: its journal, the end of every token, and the state for a resume."""
