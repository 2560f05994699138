"""Scripts for users; a package so that tests can import the small GPT of `pretrain_gpt_tiny.py`."""
