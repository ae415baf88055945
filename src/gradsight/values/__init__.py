"""The frozen types that travel between the parts. No torch."""
