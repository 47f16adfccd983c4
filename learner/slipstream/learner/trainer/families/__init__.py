"""Recipes of model families: how Bridge builds and maps each architecture."""
