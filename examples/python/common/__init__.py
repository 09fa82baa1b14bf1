"""What the training programs share: flags, plan, loop, history."""
