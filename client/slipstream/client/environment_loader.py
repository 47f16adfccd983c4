"""Turns "package.module:Class" into an environment, and a failure to do so into one line."""

import importlib
import json
import sys
import sysconfig
import traceback
from pathlib import Path

from slipstream.client.environment import AnyEnvironment, Environment
from slipstream.core.errors import ConfigError, EnvironmentFailed
from slipstream.v1 import trajectory_pb2

MAX_CAUSE_CHARACTERS = 500

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib"))
_OWN_FOLDER = Path(__file__).parent
# The built-in environments, where they are installed beside the client as a library.
_BUILTIN_FOLDER = str(_OWN_FOLDER.with_name("environments"))


def environment_failed(cause: str) -> EnvironmentFailed:
    """Returns the error for a failure that is the environment's fault."""
    line = " ".join(cause.split())
    if len(line) > MAX_CAUSE_CHARACTERS:
        line = line[: MAX_CAUSE_CHARACTERS - 3] + "..."
    return EnvironmentFailed(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, line)


def describe(error: BaseException) -> str:
    """Returns type, message and place of an exception, in one line."""
    text = str(error).split("\n", 1)[0]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        # The traceback ends where Python reads modules, not at the mistake.
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_of_environment(frame.filename)]
    if not frames or (not own and is_ours(frames[-1].filename)):
        return line
    # A library that the environment called says less than the line that called it.
    last = (own or frames)[-1]
    return f"{line} ({Path(last.filename).name}:{last.lineno} in {last.name})"


def load_environment(reference: str, args_json: str, search_path: str) -> AnyEnvironment:
    """Imports the class and makes an instance; raises EnvironmentFailed with the cause.

    `search_path` goes before Python's own path, and stays there: the environment may import more
    modules later.
    """
    module_name, colon, class_name = reference.partition(":")
    if not (module_name and colon and class_name):
        raise environment_failed(f"a reference is package.module:Class, got {reference!r}")
    if search_path and search_path not in sys.path:
        sys.path.insert(0, search_path)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            where = f"{search_path} or " if search_path else ""
            raise environment_failed(
                f"there is no module {error.name!r} in {where}Python's path"
            ) from error
        raise environment_failed(f"import of {module_name} failed: {describe(error)}") from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise environment_failed(f"import of {module_name} failed: {describe(error)}") from error
    found = vars(module).get(class_name)
    if found is None:
        raise environment_failed(f"module {module_name} has no class {class_name}")
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise environment_failed(f"{reference} is no subclass of slipstream.client.Environment")
    try:
        args = json.loads(args_json or "{}")
    except (ValueError, RecursionError) as error:
        raise environment_failed(f"the arguments are not JSON: {error}") from error
    if not isinstance(args, dict):
        raise environment_failed(f"the arguments must be a JSON object, got {args_json}")
    try:
        return found(**args)
    except ConfigError as error:
        # A ConfigError says everything itself.
        raise environment_failed(str(error)) from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise environment_failed(f"{class_name}(...) failed: {describe(error)}") from error


def is_ours(filename: str) -> bool:
    """Whether a file belongs to the client."""
    return filename.startswith(str(_OWN_FOLDER))


def is_of_environment(filename: str) -> bool:
    """Whether a file belongs to an environment: not to Python, a library or the client."""
    if filename.startswith(_BUILTIN_FOLDER):
        return True
    return not (filename.startswith((*_LIBRARIES, "<")) or is_ours(filename))
