"""The controller: leases groups to servers, forms batches for the trainer and orders publishes.

It never imports torch, vllm or megatron.
"""
