"""Torch's message of a GPU whose memory is full, made short."""

import re

# The facts of the message; advice on torch's allocator and a line for each process follow.
_FACTS = re.compile(r"CUDA out of memory\..*? is free\.", re.DOTALL)
_OTHER = re.compile(r"Process \d+ has (?P<amount>[\d.]+) (?P<unit>MiB|GiB) memory in use")
_GIB = {"MiB": 1 / 1024, "GiB": 1.0}


def without_processes(text: str) -> str:
    """Returns `text` with torch's message cut to its facts, the other processes as one sum."""
    facts = _FACTS.search(text)
    if facts is None:
        return text
    shortened = text[: facts.end()]
    others = list(_OTHER.finditer(text, facts.end()))
    if others:
        total_gib = sum(float(other["amount"]) * _GIB[other["unit"]] for other in others)
        count = "Another process uses" if len(others) == 1 else f"{len(others)} other processes use"
        shortened += f" {count} {total_gib:.1f} GiB of it."
    return shortened
