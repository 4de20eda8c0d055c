"""Carry out a plan: write, prove, publish."""
