"""The flight recorder and replay."""
