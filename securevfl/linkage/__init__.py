"""Which records of a secondary are most like a record of the primary.

A *link table* gives, for each primary row, an ordered list of at most K record numbers of one
secondary, nearest first. Order and ties are part of the contract: (distance, record number),
independent of the order in which an index stores the records.
"""
