"""From verified bytes to tensors: memory first, then storage."""
