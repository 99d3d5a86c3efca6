"""Finds the fastest candidate in few trials; Optuna keeps the ledger."""

from autofit.search.driver import search

__all__ = ["search"]
