"""Numbers out of gradients: device-side, one read per step."""
