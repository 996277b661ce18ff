"""Mechanisms that choose privately which rows get a gradient, and noise."""
