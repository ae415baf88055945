"""Gradient dumps: the gradients themselves on the disk, complete or absent."""
