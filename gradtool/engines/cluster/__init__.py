"""The engine of worker processes on other machines: what exists for a cluster alone."""
