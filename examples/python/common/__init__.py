"""Shared by the training programs: flags, plan, training loop, history."""
