"""A trainer rank that computes nothing, as a program."""

from support.fakes.quick_run import train

if __name__ == "__main__":
    train()
