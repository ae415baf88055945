"""The flight recorder.

Keeps what a step was made of, diagnoses a bad one, writes it, runs it again.
"""
