"""One check per file; the package is read as a whole by the judge."""
