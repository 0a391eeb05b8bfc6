"""Named, asynchronous collective communication along graphs you choose.

This module owns the public names and nothing else. Importing it needs NumPy, msgpack and, where it exists, uvloop;
no framework, no network and no environment variable is looked at before ``init`` is called.
"""

__version__ = "0.1.0"
