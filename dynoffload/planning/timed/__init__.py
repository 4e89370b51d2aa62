"""Plans with times: keep, move or compute again, for each region of a step on a given machine."""

from __future__ import annotations

from dynoffload.planning.timed.again import computed_again
from dynoffload.planning.timed.check import check
from dynoffload.planning.timed.partition import Partition, decision_cuts, partition, plan_blocks
from dynoffload.planning.timed.plan import Decision, Plan, Stay, Transfer
from dynoffload.planning.timed.planner import ALLOWANCE, plan
from dynoffload.planning.timed.problem import Again, Life, Problem
from dynoffload.planning.timed.step import Step, step_of

__all__ = [
    "ALLOWANCE",
    "Again",
    "Decision",
    "Life",
    "Partition",
    "Plan",
    "Problem",
    "Stay",
    "Step",
    "Transfer",
    "check",
    "computed_again",
    "decision_cuts",
    "partition",
    "plan",
    "plan_blocks",
    "step_of",
]
