"""What every other package stands on: errors, argument checks, seeds, files, progress."""
