"""Programs that sections start as processes of their own, because these fail or are killed.

A program has the form of a section and is started by `python -m tests.gpu_check.section NAME
--package tests.gpu_check.children`, on a GPU or on the simulated node. The section that has started
it reads its report; see `tests.gpu_check.child`.
"""
