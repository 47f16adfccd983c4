"""Packages that simulated runs import and never use: where one is missing, nothing takes its place.

So schedules can be played on a machine that has little more than grpcio, numpy and pydantic.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

UNUSED = ("grpc_health", "grpc_reflection", "msgspec", "psutil", "pynvml", "tomli_w")


class _Nothing(Exception):
    """Whatever a missing package has: its functions, classes and errors."""

    def __getattr__(self, name: str) -> _Nothing:
        return _Nothing()

    def __call__(self, *_: object, **__: object) -> _Nothing:
        return self

    def __index__(self) -> int:
        return 0

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class _Module(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing if name[0].isupper() else _Nothing()


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None, _: object
    ) -> ModuleSpec | None:
        is_unused = name.partition(".")[0] in UNUSED
        return ModuleSpec(name, self, is_package=True) if is_unused else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> None:
    """Lets imports of missing packages succeed from now on."""
    if any(importlib.util.find_spec(name) is None for name in UNUSED):
        sys.meta_path.append(_Finder())  # type: ignore[arg-type]
