"""Checkpoint work: make, convert, load, export, verify and merge. Import from the submodules."""
