"""The rollout server: a vLLM engine, its episodes, and the weights that flow into it."""

import os

# gRPC reads it as it is imported. Our event loop starts environment workers with a fork, in which
# gRPC's handlers may begin a thread that crashes before the worker's program runs: beside many
# calls, 12 of 100 workers ended with code -11.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
