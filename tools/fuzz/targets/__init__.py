"""The targets, one file each: `TARGET` in each of these modules."""
