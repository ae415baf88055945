"""Where gradients are seen."""
