"""Noise, and what adds it: the sources of Gaussians, DP-SGD, and DP-SGD whose rows owe noise."""
