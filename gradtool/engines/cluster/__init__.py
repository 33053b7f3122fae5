"""The engine of worker processes on other machines."""
