"""MIND: news, and the impressions of them that readers got."""
