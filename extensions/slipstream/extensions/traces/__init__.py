"""Spans of groups, steps and publishes, which OpenTelemetry sends."""
