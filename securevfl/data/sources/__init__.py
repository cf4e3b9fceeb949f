"""Where a party's table comes from: files of several formats, databases, frames in Python."""
