"""Sizes and times of a job that is planned: `flashckpt plan`. Start reading at `cluster_model`."""
