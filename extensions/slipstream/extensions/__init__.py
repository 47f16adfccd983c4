"""What a run may do without: a folder for each, whose modules are imported where a part is made."""
