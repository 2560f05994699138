"""Programs for people who change the package: checks of whole machines and releases."""
