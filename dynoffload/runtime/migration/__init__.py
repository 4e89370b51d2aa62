"""Predicts what runs next, and prefetches it."""
