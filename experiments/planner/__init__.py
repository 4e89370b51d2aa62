"""A planner that keeps, moves or recomputes each region of a step, and its exact optimum.

The runtime does not follow such plans: it moves regions by `dynoffload.planning.lookahead`.
"""
