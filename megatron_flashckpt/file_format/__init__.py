"""Bytes on disk: a change here changes the format. Start reading at `manifest`."""
