"""Stand-ins that implement the same Protocol or service as the real thing."""
