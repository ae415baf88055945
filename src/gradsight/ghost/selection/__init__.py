"""Scores put to use: which rows to train on next.

looks              what is known of rows, or of domains, from the looks at their scores
draws              a row for every place of an order, by weight
row_sampler        epochs, ranks, updates and state: what all samplers share
influence_sampler  every row has a weight of its own
domain_mixer       the rows of a domain have one weight
"""
