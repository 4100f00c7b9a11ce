"""Runs the same program with torch.distributed."""
