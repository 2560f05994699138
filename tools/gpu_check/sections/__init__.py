"""Sections of the GPU check; the driver lists this package, and each module defines these names.

`LETTER` and `TITLE` name the section. `SECONDS` is its time limit, `GPUS` the number of GPUs that
it needs. `SIMULATED` is true if it also runs on the simulated node, and `ALONE` if it measures
times. `run(report)` does the work.
"""
