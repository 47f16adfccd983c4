"""The controller: which groups may start, which trajectories are trained, who serves what.

It never imports torch, vllm or megatron.
"""
