"""The vLLM engine: its start, the calls to it, and the places where it is made to do less work."""
