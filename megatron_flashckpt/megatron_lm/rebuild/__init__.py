"""Local models of all ranks, rebuilt from args; used only by `convert`. Start with model.py."""
