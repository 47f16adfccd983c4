"""Kills, stops and disconnects processes of a run, then checks the files that the run leaves."""
