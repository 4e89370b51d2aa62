"""Experts' code on fused parameters: slices taken and gradients arriving one by one."""
