"""Checks for a machine with a GPU that the test suite cannot make on a simulated one.

`scripts/gpu_check` runs them with one command: `__main__.py` starts every module of `sections` as a
process of its own, `section.py` is that process, and `report.py` is what a section tells.
No module here needs pytest.
"""
