"""Whether a dotted name is a setting."""

import typing

from pydantic import BaseModel
from slipstream.core.settings.config import Config


def setting_exists(name: str) -> bool:
    """Whether `section.key`, `section.table.key` or a whole section is one of ours."""
    model: type[BaseModel] | None = Config
    for part in name.split("."):
        if model is None or part not in model.model_fields:
            return False
        kinds = [model.model_fields[part].annotation]
        kinds += [argument for kind in kinds for argument in typing.get_args(kind)]
        tables = [
            kind
            for kind in kinds
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        model = tables[0] if tables else None
    return True
