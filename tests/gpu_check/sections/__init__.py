"""Sections of the GPU check. The driver lists this package; each module defines these names.

`LETTER` and `TITLE` name the section, `SECONDS` limits it, `GPUS` is the number of GPUs it needs,
and `SIMULATED` says that it also runs on the simulated node. `run(report)` does the work.
"""
