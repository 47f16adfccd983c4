"""The endpoints of agents: their HTTP calls, and the runs that make them."""
