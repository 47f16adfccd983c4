"""The leases of groups: which groups may start, on which servers, and their fates."""
