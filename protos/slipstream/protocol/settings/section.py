"""What all sections of a run's settings are made of."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from slipstream.protocol.address import check_address_form

_REFERENCE_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _check_reference_form(reference: str) -> str:
    if _REFERENCE_FORM.fullmatch(reference) is None:
        raise ValueError(f"a reference is package.module:Class, got {reference!r}")
    return reference


Reference = Annotated[str, AfterValidator(_check_reference_form)]
Address = Annotated[str, AfterValidator(check_address_form)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A section: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
