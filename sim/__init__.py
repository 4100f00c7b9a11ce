"""Runs a program on modelled hardware, with SimPy."""
