"""Compares answers with math-verify; each line of stdin, a JSON object, gets a line on stdout.

For example, {"answer": "1/2", "reply": "It is 0.5."} gets
{"known": true, "readable": true, "right": true}.
"""

import json
import logging
import os
import resource
import sys

from slipstream.core.machine.process import die_with_parent

# Memory limit of this process, enough for sympy: 9^9^9 must end this process and no other.
MAX_MEMORY_BYTES = 4 << 30


def main() -> None:
    """Answers each line of stdin with a line on stdout, until stdin ends."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    # math-verify warns of the missing time limit at the first call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Output of the packages goes to stderr, so that it does not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(compare(request["answer"], request["reply"])) + "\n")


def compare(answer: str, reply: str) -> dict[str, bool]:
    """Returns `known`, `readable` and `right`.

    `known` says that `answer` is mathematics, `readable` that `reply` contains mathematics, and
    `right` that they agree. Blocks without a time limit.
    """
    from math_verify import parse, verify

    # The caller limits the time; math-verify's own limit would need threads.
    no_limit = {"parsing_timeout": None}
    # The right answer is parsed as one formula: in the plain text "x^2 + 1" only the 1 is found.
    is_marked = "$" in answer or "\\boxed" in answer
    gold = [] if is_marked else parse(f"${answer}$", **no_limit)
    gold = gold or parse(answer, **no_limit)
    found = parse(reply, **no_limit)
    right = bool(gold and found) and verify(gold, found, timeout_seconds=None)
    return {"known": bool(gold), "readable": bool(found), "right": bool(right)}


if __name__ == "__main__":
    main()
