"""Other libraries under strategies; each has a package, which is imported only if it is used."""
