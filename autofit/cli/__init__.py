"""The command line; starts without importing torch."""
