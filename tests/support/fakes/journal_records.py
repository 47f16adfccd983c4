"""Records of a run's journal, as a controller writes them."""

Record = dict[str, object]


def lease_record(group: str, number: int = 0, **changes: object) -> Record:
    record: Record = {
        "kind": "lease",
        "group": group,
        "environment": "e",
        "task": number,
    }
    record |= {"number": number, "seed": 5, "deadline": 2, "server": "s", "epoch": 7}
    return record | changes


def batch_record(step: int, *groups: str, **changes: object) -> Record:
    record: Record = {
        "kind": "batch",
        "step": step,
        "batch_id": f"b{step:06d}",
        "crc32": 1,
    }
    record |= {"groups": list(groups), "trajectories": 1, "tokens": [["s", 7, 4]]}
    return record | changes
