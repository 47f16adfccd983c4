"""What a page of runs holds, as a browser takes it out of the file."""

import json
import re
from pathlib import Path
from typing import Any

_GIVEN = re.compile(
    r'<script type="application/json" id="given">(.*?)</script>', re.DOTALL
)


def given_of(page: Path) -> dict[str, Any]:
    """Returns the JSON of the only element that the page's script reads."""
    (text,) = _GIVEN.findall(page.read_text())
    return json.loads(text)
