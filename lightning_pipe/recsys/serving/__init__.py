"""A trained recommender as one artifact for a server."""

__all__: list[str] = []
