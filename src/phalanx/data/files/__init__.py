"""Files of `px.data`: TFRecords, text, fixed-length records, CSV and Parquet.

* ``source``, ``lanes``   what all formats share: which file is read when
* ``streams``             bytes of plain and compressed files
* ``crc32c``, ``records``, ``record_writer``   TFRecord files
* ``plain``, ``csv``, ``parquet``              the other formats
* ``wire``, ``example``, ``parsing``           `Example` messages
* ``datasets``            the datasets as users see them
"""
