"""Facts about the machine that a program runs on."""
