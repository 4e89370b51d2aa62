"""Integrations with trainers that run the training loop themselves, and with unmodified scripts.

Each module serves one client, and only that module imports it:
`dynoffload.integrations.transformers`, `dynoffload.integrations.lightning`. accelerate needs no
module: ``offload(model, optimizer)`` accepts the objects that its ``prepare`` returns.
"""
