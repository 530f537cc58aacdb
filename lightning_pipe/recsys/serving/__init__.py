"""A trained recommender as one artefact for a server."""

__all__: list[str] = []
