"""The parts that make a process a rank: torch.distributed, parallel groups, Megatron, device."""
