"""Training: from a configuration and data to a run folder, and from a trained run to its saved outputs."""
