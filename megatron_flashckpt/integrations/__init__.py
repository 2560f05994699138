"""Entry points for frameworks that have a training loop and a checkpoint interface of their own."""
