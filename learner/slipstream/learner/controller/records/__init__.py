"""What a run remembers of itself, to the end of every token, and how it goes on from there."""
