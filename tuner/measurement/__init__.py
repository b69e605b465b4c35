"""Clocks, cost tables and live runs."""
