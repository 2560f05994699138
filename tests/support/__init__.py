"""What tests of several folders share: jobs that ranks run, launchers, trainers, made data."""
