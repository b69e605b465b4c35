"""Task metrics: the last gate before a lossy profile is served."""
