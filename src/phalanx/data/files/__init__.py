"""Files of `px.data`: TFRecords, text, fixed-length records, CSV and Parquet.

From the bottom up:

* ``streams``                      bytes of plain and compressed files
* ``formats``                      what a format is: how the elements of one file are read
* ``crc32c``, ``records``, ``record_writer``   TFRecord files
* ``readers``, ``csv``, ``parquet``   the other formats
* ``source``                       the node that reads files, one after the other or several at a time
* ``datasets``                     the datasets as users see them
* ``example_wire``, ``example``, ``parse_example``   `Example` messages
"""
