"""Class means: the stage in which encoders are fitted to sums of records by class."""
