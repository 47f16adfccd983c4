"""Models besides the policy: the critic, and a reference that the ranks load."""
