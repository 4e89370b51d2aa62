"""What is watched of forward and backward: modules, gradients, and what autograd saves."""
