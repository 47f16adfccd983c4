"""The functions of an algorithm: losses, weights, advantages, rewards and filters.

Functions of one's own have the signatures of these, and the same inputs.
"""
