"""The demo, in small."""

from gradsight.train.demonstration import Demonstration

SMALL = Demonstration(
    steps=40,
    batch_size=6,
    block_size=32,
    width=32,
    layers=2,
    heads=2,
    target_rows=8,
    poisoned_step=32,
    poisoned_row=3,
)
