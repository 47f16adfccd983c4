"""The settings of a run: sections, the rules between them, and values derived from them."""
