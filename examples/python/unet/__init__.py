"""What the U-Net learns: images and masks, loss and scores."""
