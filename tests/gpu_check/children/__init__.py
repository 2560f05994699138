"""Programs that sections start as processes of their own, because they fail or are killed.

Each has the form of a section: `python -m tests.gpu_check.section NAME --package
tests.gpu_check.children`, on a GPU or on the simulated node. Its report goes to the section that
has started it; see `tests.gpu_check.child`.
"""
