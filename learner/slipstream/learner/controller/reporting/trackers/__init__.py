"""The trackers that get a run's numbers besides metrics.jsonl; each is imported when it is used."""
