"""Which tensors lie in the device, whole or by slices, and how they come there and back."""
