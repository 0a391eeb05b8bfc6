"""What each contender does in its worker processes, one file each; see `base`."""
