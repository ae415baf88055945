"""What ./train.sh and training_loop.py use unless the command line says otherwise: edit it."""

RESULTS_DIR = "Results"
"""Where runs are kept; a relative path starts at this folder."""

PILE_DATA_DIR = ""
"""Tokens of the Pile: a folder of .bin files of uint16 (or of text). Empty: the source of Python's
standard library, which every machine has."""

model_dtype = "float32"
"""Of the weights: float32 or bfloat16."""

train_dtype = "float32"
"""Of the computation: float32 or bfloat16."""

per_parameter = False
"""Whether each parameter's part of every score is saved too."""
