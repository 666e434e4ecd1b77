"""Kernels, each with its plain-torch reference and a dispatcher that picks what the device can run."""
