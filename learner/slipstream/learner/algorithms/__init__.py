"""The functions of an algorithm: losses, weights, advantages, rewards and filters.

Users' own functions have the same signatures and inputs as these.
"""
