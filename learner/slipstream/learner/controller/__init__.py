"""The controller, which leases groups to servers, forms batches and orders publishes.

It never imports torch, vllm or megatron.
"""
