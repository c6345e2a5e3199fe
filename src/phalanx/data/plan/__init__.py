"""What a dataset is, and how its plan is opened.

From the bottom up:

* ``columns``, ``elements``        how elements travel: columns, chunks, leaves and specs
* ``cursors``, ``nodes``           open positions, and the tree of nodes that opens them
* ``functions``                    functions of the user: how they are called, and what they may return
* ``opening``                      on row numbers where only elements move
* ``sources``, ``loaders``         where elements come from: arrays, generators, other libraries
* ``argument_checks``, ``dataset_options``   for the methods of `Dataset`
"""
