"""Judges what was measured: one check per file, findings with a reason and a fix."""
