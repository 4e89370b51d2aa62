"""Runs experts' code on fused parameters slice by slice, with one gradient per slice."""
