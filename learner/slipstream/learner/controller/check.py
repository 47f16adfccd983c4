"""Checks the classes that choose tasks: `python -m slipstream.learner.controller.check < FILE`.

Each makes a first choice, among as many tasks as a trial has.
"""

from __future__ import annotations

import os
import sys
import tomllib

from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.exit_codes import USAGE_ERROR
from slipstream.core.task_view import TaskView
from slipstream.learner.controller.tasks.own_choice import ChoiceFailed, own_choices

_TRIAL_TASKS = 1000


def main() -> int:
    """Returns 0, or 2 with the first fault as the last line of stderr."""
    config = parse_config(tomllib.loads(sys.stdin.read()), source="the resolved settings")
    curricula = {each.name: each.curriculum for each in config.environments if each.curriculum}
    try:
        for name, chooser in own_choices(curricula, search_path=os.getcwd()).items():
            try:
                chooser.choose(TaskView(_TRIAL_TASKS, 0, "trial"))
            except ChoiceFailed as error:
                raise ConfigError(f"environment {name}: {error}") from error
    except ConfigError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
