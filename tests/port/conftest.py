"""The programs of the corpus are read, and not imported."""

collect_ignore_glob = ["corpus/*", "record_names.py"]
