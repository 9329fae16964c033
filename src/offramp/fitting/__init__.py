"""`offramp fit`: from a folder of images to a bundle."""
