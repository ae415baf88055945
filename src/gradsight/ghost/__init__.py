"""The per-sample engine: which training samples push a target's loss where.

engine    the public object: observes training passes, keeps scores, saves them
blocks    one observed block after another: directions, the traced pass, its scores
tracer    sees every operation of a pass, and gives those that use a parameter to a rule
rules/    fast ways to split one operation's parameter gradient by sample, one layer family per file
fallback  the same for any operation, by forward-mode differentiation
oracle    the slow exact twin that all of the above is compared with
"""
