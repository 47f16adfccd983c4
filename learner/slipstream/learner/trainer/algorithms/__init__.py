"""The objective of a step: training sequences with their advantages, and the loss."""
