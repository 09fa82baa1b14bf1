"""What the ResNet learns: data, loss and scores of digits."""
