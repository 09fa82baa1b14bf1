"""What the U-Net learns: pictures and masks, loss and scores."""
