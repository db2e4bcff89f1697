"""Decoding, masking and noise of images and videos."""
