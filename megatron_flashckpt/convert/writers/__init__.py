"""Writers: one module per destination format; `formats` selects the module."""
