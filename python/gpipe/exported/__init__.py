"""Converts any module to a sequence of layers, by torch.export."""
