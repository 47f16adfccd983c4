"""Records of model families, one module for each lineage; `registry` finds them here."""
