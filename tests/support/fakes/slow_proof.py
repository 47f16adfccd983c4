"""A proof that says how far it is, and goes on until somebody has read that.

`SLOW_PROOF` names the file whose existence ends it.
"""

import os
import sys
from pathlib import Path

from support.rigs.waiting import wait_until

if __name__ == "__main__":
    Path(sys.argv[sys.argv.index("--progress") + 1]).write_text("loss mine:f, 2 of 5 functions")
    wait_until(Path(os.environ["SLOW_PROOF"]).exists)
