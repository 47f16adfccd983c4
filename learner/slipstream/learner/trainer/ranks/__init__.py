"""The setup of a process as a rank: torch.distributed, parallel groups, Megatron, device."""
