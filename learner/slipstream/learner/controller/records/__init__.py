"""The records of a run: its journal, the accounts of its tokens, and the state for a resume."""
