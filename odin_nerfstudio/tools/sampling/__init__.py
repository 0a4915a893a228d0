"""Procedural captures: geometry, texture, ray casting, tracks and the files of a posed capture."""
