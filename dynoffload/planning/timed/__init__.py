"""Plans with times: keep, move or compute again, for each region of a step on a given machine."""

from __future__ import annotations

from dynoffload.planning.timed.again import computed_again
from dynoffload.planning.timed.check import PlanError, check
from dynoffload.planning.timed.plan import Decision, Plan, Stay, Transfer
from dynoffload.planning.timed.planner import ALLOWANCE, plan
from dynoffload.planning.timed.problem import Again, Life, Problem

__all__ = [
    "ALLOWANCE",
    "Again",
    "Decision",
    "Life",
    "Plan",
    "PlanError",
    "Problem",
    "Stay",
    "Transfer",
    "check",
    "computed_again",
    "plan",
]
