"""The bits of one process on any number of ranks: ``same_bits=True``.

A rank has fewer tokens and samples than one process, and libraries choose the kernel of a small matrix
product by its number of rows. :mod:`rows` gives such products the rows of one process, and :mod:`row_check`
finds what still depends on the number of rows. :mod:`image_rows` does both for autoencoders, whose rows of
images are sharded.
"""
