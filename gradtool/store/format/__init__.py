"""The safetensors format: headers, indexes, limits, and the layout of new files."""
