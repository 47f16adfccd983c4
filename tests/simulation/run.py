"""Plays simulated runs: `python tests/simulation/run.py --seeds 0:1000`.

Prints each seed that breaks a rule, with the command that plays it again, and the sums at the end;
the exit code is 1 if any did.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from simulation.world import World, shared_memory  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, without END")
    parser.add_argument("--verbose", action="store_true", help="print each message")
    arguments = parser.parse_args()
    first, _, end = arguments.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    fired: Counter[str] = Counter()
    failed, tokens, virtual_s = [], 0, 0.0
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        for seed in seeds:
            result = World(seed, Path(folder) / "run", verbose=arguments.verbose).run()
            fired += result.fired
            tokens += result.trained_tokens
            virtual_s += result.virtual_s
            if result.violations:
                failed.append(seed)
                print(f"seed {seed}: {result.violations[0]}")
                for other in result.violations[1:5]:
                    print(f"    {other}")
                print(f"    python tests/simulation/run.py --seeds {seed}:{seed + 1}", flush=True)
    print(
        json.dumps(
            {
                "schedules": len(seeds),
                "failed": len(failed),
                "fired": dict(fired.most_common()),
                "trained_tokens": tokens,
                "virtual_hours": round(virtual_s / 3600, 2),
            }
        )
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
