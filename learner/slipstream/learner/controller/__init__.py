"""The controller: decides which groups start, which trajectories are trained, which servers serve.

It never imports torch, vllm or megatron.
"""
