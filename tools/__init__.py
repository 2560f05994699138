"""Programs that work on the package beside the tests: checks of whole machines and releases."""
