"""A rollout server whose engine has no model, as a program."""

from support.fakes.quick_run import serve

if __name__ == "__main__":
    serve()
