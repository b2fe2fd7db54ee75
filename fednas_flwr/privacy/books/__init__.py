"""A site's books: what its records have spent, under a key, and what is left."""
