"""Checks on a real GPU that the test suite cannot make on a simulated GPU.

`scripts/gpu_check` runs all of them: `__main__.py` starts every section that `sections` lists as a
process of its own, `section.py` is the program of that process, and `report.py` writes its facts.
No module here needs pytest.
"""
