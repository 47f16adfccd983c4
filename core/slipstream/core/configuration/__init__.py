"""Reads a configuration file and the folders of its models, and checks them together."""
