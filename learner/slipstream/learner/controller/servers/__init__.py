"""The rollout servers: how they come, in which state they are, what is told to them."""
