"""One file an operation: policy and the order of passes. Returns a frozen result and prints nothing."""
