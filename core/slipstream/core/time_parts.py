"""Names the measured parts of a step's time, of the servers' time and of waits for leases."""

# The metrics of a step that are parts of the trainer's time, in words; other parts have none.
TRAINER_PARTS = {
    "training_s": "training",
    "groups_wait_s": "waiting for groups",
    "publish_s": "publish",
    "checkpoint_s": "checkpoint",
    "export_s": "digests",
}
# The metrics of a step that are the parts of the servers' time.
SERVER_SHARES = ("servers_sampling_share", "servers_paused_share", "servers_idle_share")
# What the next lease waited for in a step, in words; NAME's metric is `lease_wait_NAME_s`.
LEASE_WAITS = {
    "staleness": "a step, by max_staleness",
    "slots": "a free place on a server",
    "server": "a server that serves",
    "environment": "an environment",
    "queue": "room in the queue",
}
