"""All files of a call or none: transaction logs, locks, replacement, changes in place, recovery."""
