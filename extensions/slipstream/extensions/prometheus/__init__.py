"""Numbers of a process for Prometheus."""
