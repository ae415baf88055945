"""The run directory, its store and the sinks."""
