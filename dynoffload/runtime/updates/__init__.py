"""Optimizer steps without a barrier: split by parameter, deferred, made when needed."""
