"""The leases of groups to rollout servers: when groups start, where they run and how they end."""
