"""The rollout server: a vLLM engine, its episodes, and the new weights that it receives."""

import os

# gRPC reads this variable when it is imported. The event loop starts environment workers with a
# fork, in which gRPC's handlers may begin a thread that crashes before the worker's program runs.
# With many calls under way, 12 of 100 workers ended with code -11.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
