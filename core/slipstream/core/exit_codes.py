"""Exit codes on which all programs of a run agree; `slipstream run` restarts some by them."""

# A program that checks something begins each line of a warning so; its exit code is 0.
WARNING = "slipstream: warning: "

DONE = 0
# The program failed; a restart may help.
FAILED = 1
# The program cannot work with these arguments and settings.
USAGE_ERROR = 2
# The program failed in a way that a restart would repeat.
FINAL_ERROR = 3
# The engine did not start, or the model did not load; another start may help.
NOT_STARTED = 4
