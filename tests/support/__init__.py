"""Helpers that several test folders share: jobs for ranks, launchers, trainers, generated data."""
