"""Questions asked of saved arrays: confidence, thresholds, policies, metrics. Nothing here needs torch."""
