"""What is minimised: losses per sample and exit, and how much each counts. Sees tensors, never models."""
