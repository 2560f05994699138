"""What users run; a package so that tests import the small GPT of `pretrain_gpt_tiny.py`."""
