"""What the ResNet learns: digits, loss and scores."""
