"""What a step costs in memory, and activation checkpointing: applied, measured, predicted, planned
and proven.

The idea of recomputing activations is from Chen, Xu, Zhang, Guestrin: "Training Deep Nets with
Sublinear Memory Cost", 2016.
"""
