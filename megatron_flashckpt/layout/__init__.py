"""Pure geometry of stored tensors: no I/O, no clock, no torch.

Start reading at piece.py, then template.py (a rank's file) and read_plan.py (a load).
"""
