"""Records of model families, one module a lineage; `registry` finds them here."""
