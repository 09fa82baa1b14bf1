"""What the diffusion model learns: data, loss and scores of digits with noise, and drawing from noise."""
