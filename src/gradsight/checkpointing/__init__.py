"""What a step costs in memory, and activation checkpointing: applied, measured, predicted, planned and proven."""
