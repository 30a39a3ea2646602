"""Vision environments; they register through entry points."""
