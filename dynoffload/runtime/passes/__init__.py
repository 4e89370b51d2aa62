"""Hooks on forward and backward: modules, gradients, and saved tensors."""
