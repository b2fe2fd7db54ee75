"""The only place where a name becomes an object: plain dicts, explicit arguments.

Everything above this package holds a :class:`~fednas_flwr.config.Config`; everything below gets
numbers and objects. What imports torch stands in modules of its own (``data``, ``networks``,
``hardware``, ``clients``, ``strategies``, ``check``), so that a configuration is checked at once.
"""
