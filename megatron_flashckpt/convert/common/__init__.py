"""What readers and writers share. Start reading at `contents`."""
