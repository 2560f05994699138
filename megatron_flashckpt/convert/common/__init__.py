"""Modules that readers and writers share; `contents` is the central one."""
