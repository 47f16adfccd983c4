"""The vLLM engine: how it is started, what is asked of it, and where it is made to do less work."""
