"""Launching, logging and small distributed helpers."""
