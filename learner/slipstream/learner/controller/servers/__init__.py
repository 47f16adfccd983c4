"""The controller's view of the rollout servers: sessions, states and orders."""
