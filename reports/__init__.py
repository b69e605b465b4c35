"""Stored results in, files out: reads a run folder and draws its front. No torch, no Optuna, no GPU."""
