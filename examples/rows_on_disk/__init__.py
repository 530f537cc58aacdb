"""A recommender whose rows are on a disk, under three plans."""
