"""Passes on x86 CPUs by code of our own, compiled once with the system's g++."""
