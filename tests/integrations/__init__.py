"""Doors into other people's trainers, by real runs of them."""
