"""One module per format that is written. `formats` picks one."""
