"""Optimizer steps without a barrier: split by parameter, put off, made when needed."""
