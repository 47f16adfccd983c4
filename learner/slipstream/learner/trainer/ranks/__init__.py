"""What makes a process a rank: torch.distributed, parallel groups, Megatron on this device."""
