"""Scenes for tests: whole runs, engines, fuzzing, and what they need of the machine."""
