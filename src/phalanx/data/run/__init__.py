"""How a plan runs: iterators, threads, and reading ahead.

From the bottom up:

* ``thread_pool``                  some threads that make calls
* ``parallel_map``, ``round_robin``   calls, or cursors, that run side by side
* ``element_queue``                each element is handed over once, whatever interrupts
* ``read_ahead``                   one thread that makes elements before they are asked for
* ``iterator``                     what users iterate with
"""
