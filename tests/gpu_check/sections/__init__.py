"""The sections. Each module has these names, and the driver finds them by listing this package.

`LETTER` and `TITLE` name the section, `SECONDS` limits it, `GPUS` is the number of GPUs it needs,
and `SIMULATED` says that it also runs on the simulated node. `run(report)` does the work.
"""
