"""The record of EXAONE 4."""

from slipstream.core.models.family import DENSE, FULL, SLIDING, Family

FAMILIES = (
    Family(
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        values=DENSE,
        layer_kinds=(FULL, SLIDING),
        query_norm="head",
        has_windows=True,
    ),
)
