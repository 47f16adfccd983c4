"""Whose an id is: it begins with its session's, and that with a hash of the session's api_key.

So the HTTP process knows an owner without memory, also after a restart. All ids, paths and names of
the API contain the session that they came from.
"""

import hashlib
import re
import secrets

_SESSION = re.compile(r"(?<![0-9A-Za-z])s([0-9a-f]{16})[0-9a-f]{16}(?![0-9A-Za-z])")


def owner_of_key(api_key: bytes, run: str) -> str:
    """Returns the owner that an api_key stands for in a run: 16 hexadecimal digits."""
    return hashlib.blake2b(api_key, digest_size=8, salt=_salt(run)).hexdigest()


def _salt(run: str) -> bytes:
    return hashlib.blake2b(run.encode(), digest_size=hashlib.blake2b.SALT_SIZE).digest()


def new_session(owner: str) -> str:
    """Returns the id of a new session of `owner`."""
    return f"s{owner}{secrets.token_hex(8)}"


def owners_in(name: str) -> set[str]:
    """Returns the owners of all sessions that an id, path or name contains."""
    return set(_SESSION.findall(name))


def is_of(name: str, owner: str) -> bool:
    """Whether `name` contains sessions, and only those of `owner`."""
    return owners_in(name) == {owner}


def have_one_owner(name: str, other: str) -> bool:
    """Whether two ids are of the same owner."""
    return owners_in(name) == owners_in(other)
