"""Calls of the package's own functions, which a test looks at."""


def noting(patch, owner, name, note):
    """Return the list of what ``note(result, *given, **named)`` makes of each call from now on.

    Args:
        patch: A ``MonkeyPatch``, which restores the function.
        owner: The module, class or object that has it.
        name: The function's name there.
        note: Called after each call that has not failed.
    """
    seen, call = [], getattr(owner, name)

    def noted(*given, **named):
        result = call(*given, **named)
        seen.append(note(result, *given, **named))
        return result

    patch.setattr(owner, name, noted)
    return seen
