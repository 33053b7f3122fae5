"""Bytes: what is in the files, how it streams in and out, and how a change is made safe. Knows no arithmetic."""
