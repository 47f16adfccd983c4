"""The other models of a run: reference and critic."""
