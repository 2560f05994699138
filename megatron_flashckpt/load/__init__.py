"""The steps of a load, from the choice of a checkpoint to filled tensors. Start at `resume`."""
