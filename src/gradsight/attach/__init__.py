"""Watches the optimizers of a script that knows nothing of it."""
