"""The accelerator's device: regions in its memory, behind it pinned host memory, behind that a
file."""
