"""What made a step bad: the operation and the samples, found by running its passes again, aside."""
