"""Running a trained network: bundles, engines, and samples that leave early."""
