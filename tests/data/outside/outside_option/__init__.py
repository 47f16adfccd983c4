"""An advantage, a queue, a part of steps, a table of settings and a check, for one option."""
