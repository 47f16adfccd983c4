"""The default judge: the kind of the right answer decides how a reply is read.

`kinds.py` has the table of kinds. `statements.py` finds what a reply states last.
"""
