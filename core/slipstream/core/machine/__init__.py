"""Tools for the machine that a program runs on: its processes, GPUs, addresses and folders."""
