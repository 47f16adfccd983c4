"""Says which sandbox the programs of models get on this machine."""

import json
import sys

from slipstream.client.launch.preflight import SETTINGS_LIMIT_S, run_program
from slipstream.client.launch.scene import Finding, Scene, advice, ok

SANDBOXES = "slipstream.environments.sandbox.report"
GUIDE = "docs/guides/sandbox.md"


async def check_sandbox(_: Scene) -> Finding:
    """Finds the sandbox that works here, and whether the kernel bounds the threads in it."""
    report = await run_program([sys.executable, "-m", SANDBOXES], limit_s=SETTINGS_LIMIT_S)
    if report.code != 0:
        cause = (report.lines or (f"no answer within {SETTINGS_LIMIT_S:g} s",))[-1]
        return advice(f"the sandboxes were not tried: {cause}", GUIDE)
    trials = json.loads(report.output)
    working = [trial for trial in trials if not trial["reason"]]
    if not working:
        reasons = "; ".join(f"{trial['backend']}: {trial['reason']}" for trial in trials)
        remedy = f"needed only where models write programs: {GUIDE}"
        return advice(f"none works here; {reasons}", remedy)
    for trial in working:
        if trial["bounds_threads"]:
            return ok(f"{trial['backend']}; the kernel bounds the threads of a program")
    seen = f"{working[0]['backend']}; the threads of a program are only counted now and then"
    return advice(seen, f"the kernel can bound them: {GUIDE}#threads")
