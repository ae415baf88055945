"""The memory of a training step: measured, predicted, monitored, and saved by checkpointing.

Activation checkpointing is applied to a model's blocks, planned for a budget, and proven to change
nothing but memory. The idea of recomputing activations is from Chen, Xu, Zhang, Guestrin:
"Training Deep Nets with Sublinear Memory Cost", 2016.
"""
