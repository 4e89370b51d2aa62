"""The accelerator device: regions in its memory, with pinned host memory and a file below it."""
