"""An accelerator that is not there, for tests: see `simulated`."""
