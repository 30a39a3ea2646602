"""Text environments; they register through entry points."""
