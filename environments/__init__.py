"""The built-in environments: one file each."""
