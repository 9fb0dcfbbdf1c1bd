"""Sessions together with the rest of what torch does to a forward and backward pass."""
