"""Strongly connected components of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node")


def components(graph: Mapping[Node, Sequence[Node]]) -> list[list[Node]]:
    """Return the strongly connected components of a graph (Tarjan 1972, without recursion)."""
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    done: set[Node] = set()
    result: list[list[Node]] = []
    for root in graph:
        if root in number:
            continue
        number[root] = low[root] = len(number)
        stack.append(root)
        work = [(root, iter(graph[root]))]
        while work:
            node, successors = work[-1]
            for successor in successors:
                if successor not in number:
                    number[successor] = low[successor] = len(number)
                    stack.append(successor)
                    work.append((successor, iter(graph[successor])))
                    break
                if successor not in done:
                    low[node] = min(low[node], number[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    component: list[Node] = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                    done.update(component)
                    result.append(component)
    return result
