"""JSON values of any form, as hypothesis draws them."""

from hypothesis import strategies as st


def json_trees(texts, *, keys=None):
    """Values nested a few times; ``keys`` of mappings are texts unless they are given."""
    keys = texts if keys is None else keys
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts

    def inside(inner):
        return st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)

    return st.recursive(leaves, inside, max_leaves=8)
