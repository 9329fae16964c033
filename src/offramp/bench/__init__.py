"""What training, leaving early and serving take on this machine."""
