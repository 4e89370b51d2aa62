"""Baselines: DTR, strict replay of a recorded order, memory groups in which the system pages."""
