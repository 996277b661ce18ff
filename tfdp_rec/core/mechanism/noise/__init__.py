"""Sources of unit Gaussians."""
