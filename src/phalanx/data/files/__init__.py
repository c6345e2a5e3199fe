"""Files of `px.data`: TFRecords, text, fixed-length records, CSV and Parquet.

* ``file_reader``, ``interleaved``, ``source``     what all formats share: which file is read when
* ``streams``                                      bytes of plain and compressed files
* ``crc32c``, ``records``, ``record_writer``       TFRecord files
* ``readers``, ``csv``, ``parquet``                the other formats
* ``example_wire``, ``example``, ``parse_example``   `Example` messages
* ``datasets``                                     the datasets as users see them
"""
