"""The nodes of a plan, one module per kind of transformation, each a node and its cursor.

* ``selecting``, ``shuffling``     which elements, how often, in which order; nothing looks into them
* ``batching``, ``unbatching``     elements put together, and taken apart
* ``mapping``, ``interleaving``    functions from elements to elements, and to datasets
* ``merging``                      several datasets as one
* ``cache_files``, ``caching``     a first pass that is kept
* ``prefetching``                  reading ahead

They do not know each other, but for ``unbatching``, which uses ``batching``, and ``caching``.
"""
