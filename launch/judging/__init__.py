"""Whether all arms of a run compute the same: watched in float32, settled in float64."""
