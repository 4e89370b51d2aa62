"""Dynamic tensor rematerialization (Kirisame et al., ICLR 2021), online, by ATen operators."""
