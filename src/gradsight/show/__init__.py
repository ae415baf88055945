"""Reports. No torch."""
