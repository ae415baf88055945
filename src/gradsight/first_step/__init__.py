"""What one or two steps decide exactly: leaks, wrong losses, wrong modes, lost gradients."""
