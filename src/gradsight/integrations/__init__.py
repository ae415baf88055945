"""Doors into other people's trainers: one module for each, imported only by those who use it."""
