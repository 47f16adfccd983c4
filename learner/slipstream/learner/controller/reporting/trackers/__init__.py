"""Where the numbers of a run go beside metrics.jsonl; each package is imported when it is used."""
