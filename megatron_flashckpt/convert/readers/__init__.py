"""One module per format that is read. `formats` picks one."""
