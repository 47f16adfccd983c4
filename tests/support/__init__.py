"""What tests share: fakes, rigs that set a scene, programs of ranks, and plain references."""
