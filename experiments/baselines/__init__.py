"""Baselines: strict replay of a recorded order, and memory groups in which the system pages."""
