"""Measured profiles that ship with lossytune, as JSON files. Their identity is inside and checked at load."""
