"""report.html: one picture of every layer, in one file that asks for nothing. No torch."""
