"""Sizes and times of a planned job, for `flashckpt plan`; `cluster_model` is the entry point."""
