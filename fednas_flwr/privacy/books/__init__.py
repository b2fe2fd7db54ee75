"""A site's books: the spending of its records, sealed with a key, and what is left of budgets."""
