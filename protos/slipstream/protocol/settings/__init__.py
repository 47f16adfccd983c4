"""The settings of a run: sections, the rules between them, and what follows from them."""
