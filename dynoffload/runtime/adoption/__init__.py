"""Moves tensors into device regions, whole or by slices, and back into ordinary memory."""
