"""Programs that sections start as processes of their own, because these fail or are killed.

A program has the form of a section and is started by `python -m tools.gpu_check.section NAME
--package tools.gpu_check.children`, on a GPU or on the simulated node. The section that has started
it reads its report; see `tools.gpu_check.child`.
"""
