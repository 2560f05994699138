"""Pure geometry and format: no I/O, no clock, no torch, no torch.distributed."""
