"""Clients: trainers that run the loop themselves, and scripts whose loop is left as it is.

Each module serves one client and imports it; nothing else of the package does:
`dynoffload.integrations.transformers`, `dynoffload.integrations.lightning`. accelerate needs no
module of its own: ``offload(model, optimizer)`` takes what its ``prepare`` returns.
"""
