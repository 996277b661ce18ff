"""Clicks: what private training brings on click logs, beside private sums and training without privacy."""
