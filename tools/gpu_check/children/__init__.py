"""Programs that sections start as processes of their own, because these fail or are killed.

A program has the form of a section, and `tools.gpu_check.section` runs it on a GPU or on the
simulated node. The section that has started it reads its report; see `tools.gpu_check.process`.
"""
