"""Every code block of the README and of the pages under docs, run as it is written."""
