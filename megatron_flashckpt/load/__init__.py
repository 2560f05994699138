"""From "which checkpoint?" to filled tensors. Start reading at `resume`."""
